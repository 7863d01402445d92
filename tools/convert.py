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
from collections.abc import Sequence
from pathlib import Path

from fusionrl.base.stores import create_group_store
from fusionrl.config.config import Config, PassThrough
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import trainer_plan
from fusionrl.trainer.model_rank import ModelRank


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
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one process, in host memory
    values = {
        "hf_checkpoint": options.hf_checkpoint,
        "megatron_checkpoint": options.megatron_checkpoint,
        "precision": options.precision,
        "device": "cpu",
    }
    config = Config.from_flat(values, PassThrough())
    trainer = ModelRank(config, trainer_plan(config, TrainerLayout(1), "cpu", os.cpu_count() or 1), 0, "unused")
    store = create_group_store("127.0.0.1", 600.0)
    try:
        modules, transformer = trainer.setup_model("127.0.0.1", store.port)
        if options.direction == "to-megatron":
            from fusionrl.trainer.checkpoint import save_weights

            save_weights(str(options.out), modules, rank=0)
        else:
            from fusionrl.models.hf_io import iter_hf_tensors, save_hf

            tensors = iter_hf_tensors(modules, transformer, trainer.shape)
            save_hf(options.out, options.hf_checkpoint, tensors, write=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        trainer.shutdown()
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
