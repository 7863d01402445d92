"""Adapters between PEFT's folders and this rank's part of them: each rank reads its own part, one writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fusionrl.models.adapters import AdapterSpec
from fusionrl.models.hf_io import HFReader, fill_adapters, read_part
from fusionrl.models.peft_config import CONFIG, FLAG, WEIGHTS, PeftFolder, peft_config, peft_name, read_peft
from fusionrl.models.published import Place
from fusionrl.models.shape import ModelShape


class PeftReader(HFReader):
    """Tensors of a PEFT folder by the names of the rules, each read at its first use; raises as `HFReader`."""

    def __init__(self, peft: PeftFolder) -> None:
        self.folder, self.flag, self.form, self.quantization = peft.folder, peft.flag, None, None
        self._open = {}
        self._places = {name: Place(stored) for name, (stored, _) in peft.stored.items()}
        self._files = {stored: tensor.file for stored, tensor in peft.stored.values()}


def load_peft(
    folder: str | Path, chunks: Iterable[torch.nn.Module], shape: ModelShape, spec: AdapterSpec, flag: str = FLAG
) -> None:
    """Copy the adapter of `folder` into this rank's part of the adapters, at any layout.

    Raises ValueError as `read_peft`, and if the folder's adapter is not of `spec`.
    """
    peft = read_peft(folder, shape, flag)
    peft.check(spec)
    reader = PeftReader(peft)
    fill_adapters(chunks, shape, spec, partial(read_part, reader))


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

    `tensors` are those of `iter_hf_tensors` with `spec`. A folder of that name is always complete. Raises ValueError
    if `path` is there already.
    """
    path = Path(path)
    if write and path.exists():
        raise ValueError(f"{flag} {path}: it exists already; give another folder, or {{rollout_id}} in its name")
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if write:
            whole[peft_name(name, shape)] = tensor.detach().to("cpu", copy=True).contiguous()
    if not write:
        return
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(whole, partial / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(peft_config(spec, shape, base), indent=2)
    (partial / CONFIG).write_text(text + "\n", encoding="utf-8")
    partial.rename(path)
