"""Convert weights between Hugging Face folders and Megatron checkpoints (torch_dist), both ways.

    python tools/convert.py to-megatron --hf-checkpoint HF --out DIR
    python tools/convert.py to-hf --hf-checkpoint HF --megatron-checkpoint DIR --out NEW

HF is a Hugging Face folder: its config.json is the model's shape, its tokenizer is copied. DIR may be a checkpoint of
Megatron-LM, slime or fusionrl, of any layout. One process on this machine's CPU, in the precision of --precision, with
memory for one copy of the model. Training needs no conversion: it reads both (`--hf-checkpoint`,
`--megatron-checkpoint`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.base.group_stores import create_group_store
from fusionrl.config.config import Config, PassThrough
from fusionrl.models import families
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import trainer_plan
from fusionrl.trainer.model_rank import ModelRank

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("direction", choices=["to-megatron", "to-hf"])
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face folder (to-hf: its config and tokenizer)")
    parser.add_argument("--megatron-checkpoint", help="Megatron checkpoint to read (to-hf)")
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must not exist")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of what is written")
    options = parser.parse_args(argv)
    if (options.direction == "to-hf") != (options.megatron_checkpoint is not None):
        parser.error("--megatron-checkpoint belongs to to-hf, which needs it")
    if options.out.exists():
        parser.error(f"--out {options.out}: it exists already; give another folder")
    try:
        if options.direction == "to-megatron":
            to_megatron(options.hf_checkpoint, options.out, options.precision)
        else:
            to_hf(options.hf_checkpoint, options.megatron_checkpoint, options.out, options.precision)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


def to_megatron(hf_checkpoint: str, out: Path, precision: str) -> None:
    """Write the weights of a Hugging Face folder as a Megatron checkpoint.

    Raises:
        ValueError: a folder or a flag that does not fit.
    """
    with _model(hf_checkpoint, None, precision) as (_, modules, _):
        from fusionrl.trainer.checkpoint import save_weights  # Megatron, after the CPU layer is in place

        save_weights(str(out), modules, rank=0)


def to_hf(hf_checkpoint: str, megatron_checkpoint: str, out: Path, precision: str) -> None:
    """Write the weights of a Megatron checkpoint as a Hugging Face folder; may be called again and again.

    Raises:
        ValueError: a folder or a flag that does not fit.
    """
    with _model(hf_checkpoint, megatron_checkpoint, precision) as (trainer, modules, transformer):
        from fusionrl.models.hf_io import iter_hf_tensors
        from fusionrl.models.hf_save import save_hf

        tensors = iter_hf_tensors(modules, transformer, trainer.shape)
        save_hf(out, hf_checkpoint, tensors, write=True, kept=families.kept(trainer.shape))


@contextmanager
def _model(
    hf_checkpoint: str, megatron_checkpoint: str | None, precision: str
) -> Iterator[tuple[ModelRank, list[torch.nn.Module], TransformerConfig]]:
    """Give the model with its weights, in one process and in host memory."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    values = {
        "hf_checkpoint": hf_checkpoint,
        "megatron_checkpoint": megatron_checkpoint,
        "precision": precision,
        "device": "cpu",
    }
    config = Config.from_flat(values, PassThrough())
    trainer = ModelRank(config, trainer_plan(config, TrainerLayout(1), "cpu", os.cpu_count() or 1), 0, "unused")
    store = create_group_store("127.0.0.1", 600.0)
    try:
        yield (trainer, *trainer.setup_model("127.0.0.1", store.port))
    finally:
        trainer.shutdown()


if __name__ == "__main__":
    sys.exit(main())
