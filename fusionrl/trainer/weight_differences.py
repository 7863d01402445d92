"""The first tensor in which two folders of weights differ: safetensors files, or Megatron checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint
from safetensors import safe_open
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fusionrl.models.hf_folder import stored_tensors
from fusionrl.trainer.safe_load import only_data

_Reader = tuple[list[str], Callable[[str], torch.Tensor]]  # names in order, and what reads one


def first_differing_tensor(one: Path, other: Path) -> str | None:
    """Return in words the first tensor that differs in its bits, sizes or dtype; None if all are equal.

    One tensor of each folder is in memory at a time.

    Raises:
        ValueError: a folder has no weights, or weights that cannot be read.
    """
    (names, read), (other_names, read_other) = _open(one), _open(other)
    shared = set(names) & set(other_names)
    for there, folder in ((names, other), (other_names, one)):
        if lacking := next((name for name in there if name not in shared), None):
            return f"{lacking}: it is not in {folder}"
    for name in names:
        if text := tensor_difference(read(name), read_other(name)):
            return f"{name}: {text}"
    return None


def tensor_difference(one: torch.Tensor, other: torch.Tensor) -> str:
    """Return in words how two tensors differ; "" where they have the same bits, sizes and dtype."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        kinds = (f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in (one, other))
        return ", ".join(kinds)
    if not one.numel():
        return ""
    bits = [tensor.contiguous().flatten().view(torch.uint8).view(one.numel(), -1) for tensor in (one, other)]
    differing = (bits[0] != bits[1]).any(-1).nonzero().flatten()
    if not len(differing):
        return ""
    place = [int(index) for index in torch.unravel_index(differing[0], one.shape)] if one.dim() else []
    values = (tensor.flatten()[differing[0]].item() for tensor in (one, other))
    return f"{len(differing)} of {one.numel()} elements differ, the first at {place}: {', '.join(map(str, values))}"


def _open(folder: Path) -> _Reader:
    """Open a folder of safetensors files or of a checkpoint, or the folders of a checkpoint's several models."""
    if (folder / ".metadata").is_file():
        return _open_checkpoint(folder)
    # The policy or one of its adapters comes first, then a critic or reward model.
    models = [path.parent for path in folder.glob("*/.metadata")]
    models.sort(key=lambda path: (not path.name.startswith("trainer"), path.name))
    if not models:
        return _open_safetensors(folder)
    places: dict[str, tuple[Callable[[str], torch.Tensor], str]] = {}
    for model in models:
        names, read = _open_checkpoint(model)
        prefix = "" if model.name == "trainer" else f"{model.name}: "
        places |= {prefix + name: (read, name) for name in names}

    def read_of(name: str) -> torch.Tensor:
        read, own_name = places[name]
        return read(own_name)

    return list(places), read_of


def _open_safetensors(folder: Path) -> _Reader:
    stored = stored_tensors(folder, "weights")

    def read(name: str) -> torch.Tensor:
        with safe_open(stored[name].file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return list(stored), read


def _open_checkpoint(folder: Path) -> _Reader:
    """Weights come first, then the optimizer's tensors."""

    def blamed(error: BaseException) -> ValueError:
        return ValueError(f"checkpoint {folder}: it cannot be read ({_first_line(error):.200})")

    def read(name: str) -> torch.Tensor:
        part = {name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype)}
        try:
            with only_data():
                torch.distributed.checkpoint.load(part, storage_reader=FileSystemReader(folder), no_dist=True)
        except (Exception, CheckpointException) as error:  # a damaged file raises errors of many kinds
            raise blamed(error) from error
        return part[name]

    try:
        with only_data():
            stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # as above
        raise blamed(error) from error
    sizes = {name: facts for name, facts in stored.items() if isinstance(facts, TensorStorageMetadata)}
    return sorted(sizes, key=lambda name: name.startswith("optimizer")), read


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
