"""Hugging Face folders without the values: the text part of config.json, the tensors' names and places, files' headers.

Multimodal models as they are published have the text model's tensors under longer names, those of a layer's experts
perhaps in one, and tensors that no text model has. A text model's own folder is the simplest case: every tensor stands
under its name. Headers are read in milliseconds, before anything starts. Pure.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fusionrl.base.files import plain_name
from fusionrl.models import families
from fusionrl.models.rules import HfConfig, Published, Sizes
from fusionrl.models.vision import VisionShape

_MODEL = "model."
_MODULES = ("modules_to_not_convert", "ignored_layers")  # of a quantization_config


class Place(NamedTuple):
    """Where the files have a tensor of the text model."""

    name: str  # of the tensor in the files
    expert: int | None = None  # number of the expert, if `name` has the tensors of all; None: it is this one alone
    num_experts: int = 1  # that `name` has
    part: int = 0  # place among the tensors that it has of each expert, one over the other
    num_parts: int = 1
    may_turn: bool = False  # `name` may have [in, out] of each expert
    is_turned: bool = False  # it has

    def whole(self, sizes: Sizes) -> Sizes:
        """Sizes of the tensor in the files, where those of the text model's are `sizes`."""
        if self.expert is None:
            return sizes
        of_expert = (self.num_parts * sizes[0], *sizes[1:])
        return (self.num_experts, *(of_expert[::-1] if self.is_turned else of_expert))

    def own(self, sizes: Sizes) -> Sizes:
        """Sizes of this tensor, where `sizes` are those in the files."""
        return sizes if self.expert is None else (sizes[1] // self.num_parts, *sizes[2:])

    def turned(self, sizes: Sizes, stored: Sizes) -> Place:
        """This place as the files have it, whose tensor is of `stored` sizes and the text model's of `sizes`.

        Raises ValueError for an expert's square tensor, whose sizes do not tell.
        """
        other = self._replace(is_turned=True)
        if not self.may_turn or stored != other.whole(sizes):
            return self
        if stored == self.whole(sizes):
            raise ValueError(
                f"tensor {self.name} is square for each expert: it does not say which dimension is the input"
            )
        return other

    def taken(self, sizes: Sizes, dim: int = 0, part: slice | None = None) -> tuple[int | slice, ...] | None:
        """Return the index into the tensor in the files: of dimension `dim` only `part`, if given. None: take all.

        Where it `is_turned`, the result is the transpose of this tensor.
        """
        whole = [slice(0, size) for size in sizes]
        ranges = [*whole[:dim], whole[dim] if part is None else part, *whole[dim + 1 :]] if sizes else whole
        if self.expert is None:
            return None if ranges == whole else tuple(ranges)
        first = self.part * sizes[0]
        of_expert = (slice(first + ranges[0].start, first + ranges[0].stop), *ranges[1:])
        return (self.expert, *(of_expert[::-1] if self.is_turned else of_expert))


def text_config(raw: HfConfig) -> HfConfig:
    """The text model's config.json: `raw` itself, or made of that of a multimodal model. ValueError: it has none."""
    model_type = raw.get("model_type")
    family = families.published_family(model_type) if isinstance(model_type, str) else None
    if family is None or family.published is None:
        return raw
    form, text = family.published, raw.get("text_config")
    if text is None and "hidden_size" in raw:  # as Qwen2.5-VL was published
        text = {name: value for name, value in raw.items() if name not in ("model_type", "vision_config")}
    if not isinstance(text, Mapping) or text.get("model_type", family.model_type) != family.model_type:
        raise ValueError(f"model_type {model_type!r} needs a text_config whose model_type is {family.model_type!r}")
    own = {"model_type": family.model_type, "architectures": raw.get("architectures")}
    if form.architecture is not None:
        own["architectures"] = [form.architecture]
    above = {name: raw[name] for name in ("tie_word_embeddings", "quantization_config") if name in raw}
    if isinstance(quantization := above.get("quantization_config"), Mapping):
        modules = {name: quantization[name] for name in _MODULES if isinstance(quantization.get(name), list)}
        renamed = {name: [text_name(str(one), form) for one in ones] for name, ones in modules.items()}
        above["quantization_config"] = {**quantization, **renamed}
    return {**text, **above, **own}


def form_of(text: HfConfig) -> Published | None:
    """The form in which the text model of this config.json may be published, if it is known."""
    try:
        return families.get_family(text.get("model_type", "")).published
    except ValueError:
        return None


def text_name(stored: str, form: Published) -> str:
    """The text model's name of a tensor or module that the files call `stored`; others keep theirs."""
    for prefix, own in form.prefixes.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def whole_name(name: str, form: Published) -> str:
    """The inverse: what the whole model's files call the text model's tensor, or the tower's, `name`."""
    for prefix, own in form.prefixes.items():
        if own and name.startswith(own):
            return prefix + name.removeprefix(own)
    return next((prefix for prefix, own in form.prefixes.items() if not own), "") + name


def vision_of(raw: HfConfig, text: HfConfig) -> VisionShape:
    """The tower of a model, of its config.json and that of its text part. ValueError: none that is trained here."""
    form = form_of(text)
    if form is None or form.vision is None or not isinstance(raw.get("vision_config"), Mapping):
        forms = [family.published for family in families.built_in()]
        names = ", ".join(one.model_type for one in forms if one is not None and one.vision is not None)
        raise ValueError(f"a {raw.get('model_type')} model sees no images; models that do are {names}")
    return form.vision(raw, text)


def places(stored: Iterable[str], text: HfConfig) -> dict[str, Place]:
    """Return the place of each tensor of `stored`, the names in the files, by the name that the text model has for it,
    or by its own; `text` is the text model's config.json."""
    form = form_of(text)
    if form is None:
        return {name: Place(name) for name in stored}
    num_experts = int(next((text[name] for name in families.parts.NUM_EXPERTS if text.get(name)), 0))
    return {name: place for one in stored for name, place in _tensors_in(one, form, num_experts)}


def _tensors_in(stored: str, form: Published, num_experts: int) -> Iterator[tuple[str, Place]]:
    """The text model's tensors that one of the files has; itself where it has no other."""
    name = text_name(stored, form)
    layer, _, ending = name.rpartition(".experts.")
    parts = form.packed.get(ending, ()) if layer.startswith((_MODEL, "mtp.")) and num_experts else ()
    if not parts:
        yield name, Place(stored)
    for part, of_expert in enumerate(parts):
        for expert in range(num_experts):
            where = Place(stored, expert, num_experts, part, len(parts), form.may_turn)
            yield f"{layer}.experts.{expert}.{of_expert}", where


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Where Megatron-LM says which checkpoint of a folder is the newest.
TRACKER = "latest_checkpointed_iteration.txt"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header has it: its sizes, its dtype in safetensors' words (BF16, F8_E4M3, …), the file."""

    sizes: tuple[int, ...]
    dtype: str
    file: Path


def is_megatron_folder(folder: str | Path) -> bool:
    """Return whether the weights there are a checkpoint of Megatron-LM's (torch_dist), slime's or our own."""
    path = Path(folder)
    marks = (TRACKER, ".metadata", "trainer/.metadata")
    return any((path / mark).is_file() for mark in marks)


def weights_folder(path: str, flag: str = "--megatron-checkpoint") -> Path:
    """The folder with Megatron's files: `path` itself, `path`/trainer of a run's checkpoint, or what
    latest_checkpointed_iteration.txt in `path` names (iter_0000010 or release), as Megatron-LM and slime write it.

    Raises ValueError if no Megatron checkpoint is there, or one in another format.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: there is no such folder")
    tracker = folder / TRACKER
    candidates = [folder, folder / "trainer"]
    if tracker.is_file():
        latest = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"release|[0-9]{1,9}", latest):
            raise ValueError(f"{flag} {path}: {TRACKER} holds {latest[:40]!r}, no number and not release")
        candidates = [folder / (latest if latest == "release" else f"iter_{int(latest):07d}")]
    for candidate in candidates:
        if (candidate / ".metadata").is_file():
            _check_has_weights(candidate, flag)
            return candidate
    if any(list(candidate.glob("mp_rank_*")) for candidate in candidates):
        raise ValueError(
            f"{flag} {path}: it is in Megatron's older format (mp_rank_* folders); "
            "save it again with --ckpt-format torch_dist"
        )
    raise ValueError(f"{flag} {path}: it has no Megatron checkpoint (no .metadata, no {TRACKER})")


def _check_has_weights(folder: Path, flag: str) -> None:
    """Refuse a checkpoint of a run with adapters."""
    try:
        adapted = json.loads((folder / "fusionrl.json").read_text(encoding="utf-8")).get("adapted")
    except (OSError, ValueError, AttributeError, RecursionError):  # not of our own; who loads it finds the damage
        return
    if adapted:
        base = adapted.get("base") if isinstance(adapted, dict) else None
        raise ValueError(
            f"{flag} {folder}: it has adapters alone, of the base in {base}; merge them into it (fusionrl export"
            " --merge) and give the result as --hf-checkpoint"
        )


def check_weight_files(folder: str | Path, flag: str = "--hf-checkpoint") -> None:
    """Check that every .safetensors file that the folder needs is there and whole."""
    for path in _weight_files(Path(folder), flag):
        tensors_of(path, flag)


def stored_tensors(folder: str | Path, flag: str = "--hf-checkpoint") -> dict[str, StoredTensor]:
    """Return the tensors of the folder by name, as a reader finds them: of a sharded one those that the index names."""
    paths = _weight_files(Path(folder), flag)
    if (index := _read_index(Path(folder), flag)) is not None:
        found = {name: tensors_of(path, flag).get(name) for name, path in index.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}
    single = [path for path in paths if path.name == SINGLE]
    return {name: tensor for path in single or paths for name, tensor in tensors_of(path, flag).items()}


def tensor_files(folder: str | Path, flag: str = "--hf-checkpoint") -> dict[str, Path]:
    """Return the file of each tensor. Those that an index names are not opened: a node may lack other stages' files."""
    single = Path(folder) / SINGLE
    if (index := _read_index(Path(folder), flag)) is not None:
        return index
    if not single.is_file():
        raise ValueError(
            f"{flag} {folder}: it has neither {SINGLE} nor {INDEX}; convert other formats with transformers'"
            " save_pretrained"
        )
    return dict.fromkeys(tensors_of(single, flag), single)


def _read_index(folder: Path, flag: str) -> dict[str, Path] | None:
    """Return the file of each tensor by the folder's index; None without one."""
    if not (folder / INDEX).is_file():
        return None
    try:
        index = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(index.values()))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{flag} {folder}: {INDEX} is malformed ({error!r})") from error
    for name in names:
        if not plain_name(name, f"{flag} {folder}: {INDEX}").endswith(".safetensors"):
            raise ValueError(f"{flag} {folder}: {INDEX} names {name!r}; convert the weights to safetensors")
    return {name: folder / file for name, file in index.items()}


def _weight_files(folder: Path, flag: str) -> list[Path]:
    """Return the .safetensors files that the folder needs, which are there."""
    index = _read_index(folder, flag)
    paths = sorted(folder.glob("*.safetensors") if index is None else set(index.values()))
    if index is not None and (missing := [path.name for path in paths if not path.is_file()]):
        raise ValueError(f"{flag} {folder}: {INDEX} names files that are missing: {', '.join(missing[:5])}")
    if not paths:
        raise ValueError(f"{flag} {folder}: it has no .safetensors file; convert the weights to safetensors")
    return paths


def tensors_of(path: Path, flag: str) -> Mapping[str, StoredTensor]:
    """Return the tensors of one file by name; a file that stays is read once.

    The format: 8 bytes of header length (little endian), the header as JSON, then the tensors' bytes.

    Raises:
        OSError: the file is not there.
        ValueError: it is cut off or no safetensors.
    """
    status = path.stat()
    return _read_header(path, flag, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=512)
def _read_header(path: Path, flag: str, size: int, _changed: int) -> Mapping[str, StoredTensor]:
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{flag} {path}: not a safetensors file, or cut off in its header")
        tensors, expected = dict[str, StoredTensor](), 8 + length
        try:
            for name, entry in json.loads(file.read(length)).items():
                if name == "__metadata__":
                    continue
                sizes, end = tuple(entry["shape"]), entry["data_offsets"][1]
                if any(type(number) is not int or number < 0 for number in (*sizes, end)):
                    raise ValueError(f"of {name}: sizes and places that are not numbers")
                tensors[name] = StoredTensor(sizes, str(entry.get("dtype")), path)
                expected = max(expected, 8 + length + end)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(f"{flag} {path}: malformed safetensors header ({error!r})") from error
    if size != expected:
        raise ValueError(
            f"{flag} {path}: the file has {size} bytes, its header describes {expected}; it is cut off or damaged, copy"
            " it again"
        )
    return tensors
