"""`fusionrl export FROM OUT [--merge]`: an adapter out of a run as a PEFT folder, or added to its base model."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.base import cpu_wing
from fusionrl.base.imports import quiet
from fusionrl.cli import refuse
from fusionrl.models.families import kept
from fusionrl.models.hf_folder import is_megatron_folder
from fusionrl.models.peft import CONFIG, read_peft
from fusionrl.models.shape import ModelShape, read_json_object, read_model_shape
from fusionrl.models.trainable import AdapterSpec, base_identity, peft_sizes, saved_in
from fusionrl.observe.run_dir import holds_run
from fusionrl.runtime.checkpoints import Checkpoints

if TYPE_CHECKING:
    from fusionrl.weights.adapters import ReadTensor

_FLAG, _COMMAND = "--hf-checkpoint", "fusionrl export"


def run(argv: Sequence[str]) -> int:
    """Write the folder; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("source", metavar="FROM", type=Path, help="a run, a checkpoint of one, or a PEFT folder")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; must not exist")
    parser.add_argument("--merge", action="store_true", help="write the whole model, the adapter added to its weights")
    parser.add_argument("--adapter", metavar="NAME", help="of several in the run, this one")
    parser.add_argument(
        _FLAG, help="folder of the base model, if it is no longer where the run or PEFT's config has it"
    )
    options = parser.parse_args(argv)
    try:
        if options.out.exists():
            raise ValueError(f"{options.out}: it exists already; give another folder")
        with quiet():
            _export(options.source, options.out, options.merge, options.adapter, options.hf_checkpoint)
    except (OSError, ValueError) as error:
        return refuse([str(error)])
    print(options.out)
    return 0


def _export(source: Path, out: Path, merges: bool, name: str | None, base: str | None) -> None:
    from fusionrl.models.hf_io import HFReader
    from fusionrl.models.hf_save import save_hf, write_peft
    from fusionrl.weights.adapters import merged_tensors

    is_peft = (source / CONFIG).is_file()
    if is_peft and not merges:
        raise ValueError(f"{source}: it is a PEFT folder already; give --merge for a whole model")
    base, shape, spec, read = _of_peft(source, base) if is_peft else _of_checkpoint(_checkpoint(source), name, base)
    if merges:
        whole = merged_tensors(HFReader(base, _FLAG), shape, spec, read)
        save_hf(out, base, whole, write=True, kept=kept(shape))
    else:
        tensors = ((name, read(name, sizes)) for name, sizes in peft_sizes(shape, spec).items())
        write_peft(out, spec, shape, base, tensors, write=True, flag=_COMMAND)


def _of_peft(folder: Path, base: str | None) -> tuple[str, ModelShape, AdapterSpec, "ReadTensor"]:
    """Return the base's folder, its shape, the adapter's spec, and what reads its tensors."""
    from fusionrl.models.hf_io import PeftReader

    if base is None:
        base = read_json_object(folder / CONFIG, f"{folder}: {CONFIG}").get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_dir():
        raise ValueError(f"{folder}: its base model {base} is not a folder here; give {_FLAG}")
    shape = read_model_shape(base, _FLAG)
    peft = read_peft(folder, shape, _COMMAND)
    return base, shape, peft.spec, PeftReader(peft).get


def _of_checkpoint(
    folder: Path, name: str | None, base: str | None
) -> tuple[str, ModelShape, AdapterSpec, "ReadTensor"]:
    """Return the same of a checkpoint's adapter."""
    cpu_wing.prepare_megatron()
    from fusionrl.trainer.checkpoint import read_description, saved_adapters

    trainer = folder / ("trainer" if name is None else f"trainer-{name}")
    if not trainer.is_dir():
        names = sorted(path.name.removeprefix("trainer-") for path in folder.glob("trainer-*"))
        cure = f"give --adapter, one of {', '.join(names)}" if names else "give a run, a checkpoint or a PEFT folder"
        raise ValueError(f"{trainer} does not exist; {cure}")
    description = read_description(str(trainer))
    adapted = saved_in(description)
    if adapted is None:
        raise ValueError(f"{folder}: it has weights and no adapters; tools/convert.py to-hf writes them")
    if is_megatron_folder(adapted.base):
        if base is None:
            cure = f"give {_FLAG}, a folder with its weights (tools/convert.py to-hf)"
            raise ValueError(f"{folder}: its base {adapted.base} is a Megatron checkpoint; {cure}")
    elif base is not None and None not in (hashes := (base_identity(base), adapted.identity)) and len({*hashes}) > 1:
        raise ValueError(f"{_FLAG} {base}: its weights are not those of {adapted.base}, to which the adapters belong")
    base = base or adapted.base
    shape = read_model_shape(base, _FLAG, sees=description["shape"].get("vision") is not None)
    _, tensors = saved_adapters(trainer, shape)
    return base, shape, adapted.adapters, lambda name, _: tensors[name]


def _checkpoint(source: Path) -> Path:
    """Return the checkpoint's folder: `source`, or the newest one of a run."""
    if not holds_run(source):
        return source
    latest = Checkpoints(source / "checkpoints").latest()
    if latest is None:
        raise ValueError(f"{source}: the run has no checkpoint yet")
    return latest.path
