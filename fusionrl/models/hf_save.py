"""Model folders and PEFT's, written: in a temporary folder, renamed at the end, so that a folder is always complete.

Of a published multimodal model the folder is as the one that it was made from, with the tensors that were not trained.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fusionrl.base.files import flush, publish_folder
from fusionrl.models.hf_folder import INDEX, SINGLE, form_of, text_config
from fusionrl.models.hf_io import HFReader
from fusionrl.models.peft import CONFIG, WEIGHTS, peft_config, peft_name
from fusionrl.models.quantization import SCALE
from fusionrl.models.shape import ModelShape, read_hf_config, read_text_config
from fusionrl.models.trainable import AdapterSpec

# Weights in any of their forms; everything else of a model folder is copied to exported weights.
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def save_hf(
    path: str | Path,
    source: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    write: bool,
    max_file_bytes: int = 5 * 1024**3,
    kept: re.Pattern[str] | None = None,
) -> None:
    """Write `tensors` as a Hugging Face folder, with the config and tokenizer files of the folder `source`.

    Tensors of `source` with a name like `kept` that are not among them are written as they are stored there.

    Every rank iterates `tensors`; the one with `write` writes. Files are split, and an index written, beyond
    `max_file_bytes`. config.json gets the dtype of the tensors. A published multimodal model is written as `source`
    has it, with the tensors that do not belong to the text model. Raises ValueError if `path` is there already.
    """
    if not write:
        deque(tensors, maxlen=0)
        return
    with _new_folder(Path(path), "--save-hf") as folder:
        _write_model(folder, Path(source), tensors, max_file_bytes, kept)


@contextmanager
def _new_folder(path: Path, flag: str) -> Iterator[Path]:
    """Give a temporary folder, which is renamed to `path` at the end: a folder of that name is always complete."""
    if path.exists():
        raise ValueError(f"{flag} {path}: it exists already; give another folder, or {{rollout_id}} in its name")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    publish_folder(partial, path)


def _write_model(
    folder: Path,
    source: Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_file_bytes: int,
    kept: re.Pattern[str] | None,
) -> None:
    reader = published_reader(source)
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0
    dtypes: list[torch.dtype] = []

    def with_kept() -> Iterator[tuple[str, Tensor]]:
        names = set()
        for name, tensor in tensors:
            names.add(name)
            dtypes.append(tensor.dtype)
            yield name, tensor
        if kept is not None and _has_weights(source):  # or its config.json alone
            yield from kept_tensors(source, kept, names, dtypes[-1])

    def write_part() -> None:
        file = folder / f"part-{len(files)}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        flush([file])  # now: other ranks wait, and not for so long as a disk takes for all of a large model
        files.append(list(pending))
        pending.clear()

    written = with_kept()
    if reader is not None:
        written = as_stored(_unrounded(written, reader), reader)
    for name, tensor in written:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + num_bytes > max_file_bytes:
            write_part()
            pending_bytes = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes, total_bytes = pending_bytes + num_bytes, total_bytes + num_bytes
    write_part()
    if len(files) == 1:
        (folder / "part-0.safetensors").rename(folder / SINGLE)
    else:
        weight_map = {}
        for index, names in enumerate(files):
            final = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
            (folder / f"part-{index}.safetensors").rename(folder / final)
            weight_map.update(dict.fromkeys(names, final))
        text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
    copy_companions(source, folder, str(dtypes[-1]).removeprefix("torch."))


def kept_tensors(
    source: str | Path, kept: re.Pattern[str], written: set[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of `source` that are not `written` and have a name like `kept`; those in fp8 as `dtype`."""
    reader = HFReader(source)
    quantized = reader.quantization.names if reader.quantization is not None else frozenset()
    for name in sorted(reader.names - written - {name + SCALE for name in quantized}):
        if kept.fullmatch(name):
            tensor = reader.get(name, reader.sizes(name))
            yield name, tensor.to(dtype) if name in quantized else tensor


def published_reader(source: str | Path) -> HFReader | None:
    """A reader of `source`, if its files may have another form than a text model's; None: write the text model's."""
    raw, text = read_hf_config(source, "--hf-checkpoint"), read_text_config(source, "--hf-checkpoint")
    form = form_of(text)
    if form is None or (form.is_nested and raw == text):  # such a text model's own folder is a plain one
        return None
    return HFReader(source) if _has_weights(source) else None


def _has_weights(folder: str | Path) -> bool:
    return any(Path(folder, name).is_file() for name in (INDEX, SINGLE))


def as_stored(tensors: Iterable[tuple[str, Tensor]], reader: HFReader) -> Iterator[tuple[str, Tensor]]:
    """The text model's tensors under the names of the reader's files, and those of experts packed as there."""
    packed: dict[str, Tensor] = {}
    num_left: dict[str, int] = {}
    for name, tensor in tensors:
        sizes = tuple(tensor.shape)
        place = reader.place(name, sizes)
        if place.expert is None:
            yield place.name, tensor
            continue
        if place.name not in packed:
            packed[place.name] = torch.empty(place.whole(sizes), dtype=tensor.dtype)
            num_left[place.name] = place.num_experts * place.num_parts
        packed[place.name][place.taken(sizes)] = (tensor.t() if place.is_turned else tensor).detach().cpu()
        num_left[place.name] -= 1
        if not num_left[place.name]:
            yield place.name, packed.pop(place.name)
    assert not packed, "packed experts are left over"


def _unrounded(tensors: Iterable[tuple[str, Tensor]], reader: HFReader) -> Iterator[tuple[str, Tensor]]:
    """The same, but in the files' fp32 where they have that of a tensor and it is this one when rounded."""
    for name, tensor in tensors:
        stored = reader.stored(name)
        if stored is not None and stored.dtype == "F32" and tensor.dtype != torch.float32:
            whole = reader.get(name, tensor.shape)
            tensor = whole if torch.equal(whole.to(tensor.dtype), tensor.cpu()) else tensor
        yield name, tensor


def untrained_tensors(reader: HFReader, written: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a multimodal model's files that do not belong to the text model, but those `written` already."""
    if reader.form is not None:
        names = {name for name in reader.names if reader.place(name).name in written}
        untrained = kept_tensors(reader.folder, re.compile(reader.form.others), names, torch.float32)
        yield from as_stored(untrained, reader)


def copy_companions(source: Path, target: Path, dtype: str) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if published_reader(source) is None:
        config = dict(text_config(config))
    # transformers 5 writes "dtype", transformers 4 "torch_dtype".
    config["dtype" if "torch_dtype" not in config else "torch_dtype"] = dtype
    text = config.get("text_config", {})
    for part in (config, text):
        part.pop("quantization_config", None)  # the tensors are whole again
    text.update({name: dtype for name in ("dtype", "torch_dtype") if name in text})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_peft(
    path: str | Path,
    spec: AdapterSpec,
    shape: ModelShape,
    base: str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    write: bool,
    flag: str = "--save-hf",
) -> None:
    """Write adapters of the model `base` as a PEFT folder; every rank iterates `tensors`, the one with `write` writes.

    `tensors` are those of `iter_hf_tensors` with `spec`. Raises ValueError if `path` is there already.
    """
    if not write:
        deque(tensors, maxlen=0)
        return
    with _new_folder(Path(path), flag) as folder:
        whole = {peft_name(n, shape): tensor.detach().to("cpu", copy=True).contiguous() for n, tensor in tensors}
        save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(peft_config(spec, shape, base), indent=2)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
