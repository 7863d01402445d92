"""The door to slime's flags: the wing `compat` is imported only for a command line, or a file, that has some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.config.fields import FIELDS

if TYPE_CHECKING:
    from fusionrl.compat.slime.flags.table import Entry

# Options of an engine that has data-parallel attention; without it they mean nothing, or SGLang refuses them.
DP_SIZE = ("sglang_dp_size", "sglang_data_parallel_size")
DP_ATTENTION = ("sglang_enable_dp_attention", *DP_SIZE, "sglang_enable_dp_lm_head", "sglang_moe_dense_tp_size")
ENGINE_SIZE = ("sglang_tp_size", "sglang_tp", "sglang_tensor_parallel_size")
# Options of SGLang and its router that the wing reads; the others are passed through as they are.
_ENGINE_OPTIONS = {
    *(*DP_ATTENTION, *ENGINE_SIZE, "sglang_enable_ep_moe", "sglang_disable_piecewise_cuda_graph", "sglang_dtype"),
    *("sglang_config", "sglang_router_ip", "sglang_router_port", "sglang_router_policy"),
    "sglang_router_request_timeout_secs",
}
# Values that only slime's users write for a flag that both have; "": no value.
_VALUES = {"offload_train": "", "no_offload_train": "", "update_weight_transport": "nccl", "log_probs_chunk_size": "-1"}


@dataclass
class Translated:
    """A command line in fusionrl's flags.

    argv      flags of fusionrl, and those passed through to SGLang, its router and Megatron-core
    accepted  slime's flags that fusionrl lacks, with their values: shapes to compare, and those without an effect
    notes     a line for each flag that was replaced
    errors    a line for each flag that cannot be honoured
    """

    argv: list[str] = field(default_factory=list)
    accepted: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def translate_slime_flags(argv: Sequence[str]) -> Translated:
    """Return a command line with slime's flags replaced; one without such a flag is returned unchanged."""
    if not _has_slime_flags(argv):
        return Translated(list(argv))
    from fusionrl.compat.slime.flags.translate import translate

    return translate(argv)


def slime_entry(name: str) -> Entry | None:
    """Return the entry of the slime flag `name`; None: slime does not have it, or fusionrl has it as well."""
    if not _may_be_slimes(name):
        return None
    from fusionrl.compat.slime.flags.table import TABLE

    return TABLE.get(name)


def slime_notes(accepted: dict[str, object]) -> list[str]:
    """Return a line for each reason for which accepted slime flags change nothing."""
    if not accepted:
        return []
    from fusionrl.compat.slime.flags.translate import accepted_notes

    return accepted_notes(accepted)


def is_torch_dist(folder: Path) -> bool:
    """Return whether a folder has checkpoints of Megatron-LM, or is one."""
    return (folder / "latest_checkpointed_iteration.txt").is_file() or (folder / ".metadata").is_file()


def _has_slime_flags(argv: Sequence[str]) -> bool:
    names = set()
    for position, token in enumerate(argv):
        if not token.startswith("--"):
            continue
        flag, equals, value = token.partition("=")
        name = flag[2:].replace("-", "_")
        names.add(name)
        if not equals:
            value = "".join(word for word in argv[position + 1 : position + 2] if not word.startswith("--"))
        if _may_be_slimes(name) or _is_slimes_value(name, value):
            return True
    return {"micro_batch_size", "use_dynamic_batch_size"} <= names


def _may_be_slimes(name: str) -> bool:
    """Return whether the wing's tables may have a flag: fusionrl does not, or SGLang's option needs another name."""
    if name in FIELDS or name.removeprefix("no_") in FIELDS or name in ("config", "help"):
        return False
    return name in _ENGINE_OPTIONS or not name.startswith(("sglang_", "router_"))


def _is_slimes_value(name: str, value: str) -> bool:
    if name == "rollout_function_path":
        return value.startswith(("slime.", "miles."))
    if name == "ref_load":  # a torch_dist folder also starts the policy, as in slime
        return bool(value) and is_torch_dist(Path(value))
    return _VALUES.get(name) == value
