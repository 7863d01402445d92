"""Values that a flag leaves open (`auto`, or not given): each rule once, for the plan and for a trainer without one."""

from typing import Literal

Precision = Literal["fp32", "bf16"]
Impl = Literal["local", "transformer_engine"]
WIDTHS: dict[str, int] = {"fp32": 4, "bf16": 2}  # bytes of a value


def precision_or(precision: str, default: Precision) -> Precision:
    """Return the precision that a flag names, or the default for `auto`."""
    return default if precision == "auto" else "fp32" if precision == "fp32" else "bf16"


def trainer_precision(precision: str, device: str) -> Precision:
    """Return the precision of the trainers (--precision): for `auto` bf16 on GPUs and fp32 on a CPU."""
    return precision_or(precision, "bf16" if device == "cuda" else "fp32")


def layer_impl(impl: str, device: str, has_fused_layers: bool, precision: str) -> Impl:
    """Return whose layers the trainers have (--transformer-impl): for `auto` fused ones on GPUs, where installed.

    In fp32 the local ones: no attention of Transformer Engine's takes packed sequences in it.
    """
    if impl == "auto":
        return "transformer_engine" if device == "cuda" and has_fused_layers and precision != "fp32" else "local"
    return "local" if impl == "local" else "transformer_engine"


def trainer_threads(num_threads: int | None, num_cores: int, num_local_ranks: int) -> int:
    """Return the CPU threads of a trainer rank (--train-num-threads): by default a node's cores are shared out."""
    return num_threads or max(1, num_cores // max(1, num_local_ranks))
