"""Flags without a field in `Config`: those of SGLang, the router, Megatron-core and slime.

The wing `compat` is imported only where a command line, or a file, has slime flags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fusionrl.base.wording import closest
from fusionrl.config.config import FIELDS, PassThrough
from fusionrl.config.hooks import flag_of

if TYPE_CHECKING:
    from fusionrl.compat.slime.flags import Entry


def parse_extras(
    extras: Sequence[str], errors: list[str], of_slime: Mapping[str, object] = MappingProxyType({})
) -> PassThrough:
    """Return what the tokens `extras` pass through; a message for each that no part takes goes to `errors`.

    of_slime  slime flags that were accepted already
    """
    parsed = empty_passthrough()
    parsed["slime"].update(of_slime)
    for flag, values in _group_extras(extras):
        if error := parse_extra(flag, values, parsed):
            errors.append(error)
    return PassThrough(**parsed)


def empty_passthrough() -> dict[str, dict[str, object]]:
    """Return a mapping of each kind of `PassThrough` to no values."""
    return {kind: {} for kind in PassThrough.model_fields}


@dataclass
class FileFlags:
    """The flags of a file.

    values       of our own flags, by field
    passthrough  of the parts' flags, by kind
    custom       values of a former run's --custom-config-path; None: the file does not come from a run
    overridden   names of the flags that the command line gives, those of the parts as `sglang.api_key`
    passed       names of flags that the user of a former run passed, which may have their default value
    """

    values: dict[str, object] = field(default_factory=dict)
    passthrough: dict[str, dict[str, object]] = field(default_factory=empty_passthrough)
    custom: dict[str, Any] | None = None
    overridden: Collection[str] = ()
    passed: Collection[str] = ()


def parse_extra(flag: str, values: list[str], parsed: dict[str, dict[str, object]]) -> str | None:
    """Put the value of one flag without a field into `parsed`, by kind; return the error if no part takes it."""
    from fusionrl.config import upstream_flags as upstream

    field = flag[2:].replace("-", "_")
    text = " ".join([flag, *values])
    try:
        if flag.startswith("--") and (entry := slime_entry(field)) is not None:
            return entry.accept(field, values, parsed["slime"])
        if (cure := _cure(flag)) is not None:
            return f"{text}: {cure}"
        if not flag.startswith("--"):
            return f"{flag}: unexpected argument (flags begin with --)"
        part, option = upstream.split_flag(flag)
        if part:
            parser, owned = upstream.PARTS[part]
            parsed[part].update(upstream.parse_with(parser(), option, values, owned))
        else:
            for kind, value in upstream.parse_megatron(field, values).items():
                parsed[kind][field.removeprefix("no_") if value is False else field] = value
    except upstream.UpstreamError as error:
        return f"{text}: {error}{_did_you_mean(flag)}"
    except KeyError:
        return f"{flag}: unknown flag{_did_you_mean(flag)}"
    return None


def _group_extras(extras: Sequence[str]) -> list[tuple[str, list[str]]]:
    if not extras:
        return []
    from fusionrl.config.aliases import setting_of

    grouped: list[tuple[str, list[str]]] = []
    for token in extras:
        if token.startswith("--") and len(token) > 2:
            flag, separator, value = token.partition("=")
            grouped.append((flag, [value] if separator else []))
        elif setting_of(token) is not None:
            grouped.append((token, []))
        elif grouped:
            grouped[-1][1].append(token)
        else:
            grouped.append((token, []))
    return grouped


def _cure(flag: str) -> str | None:
    """Say what to write for a flag with underscores, or for another trainer's; None for any other flag."""
    from fusionrl.config.aliases import cure_for, setting_of

    plain = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and (plain in FIELDS or plain.removeprefix("no_") in FIELDS):
        return f"flags are written with dashes: --{plain.replace('_', '-')}"
    return cure_for(setting_of(flag) or flag, FIELDS)


def _did_you_mean(flag: str) -> str:
    from fusionrl.config import upstream_flags as upstream

    if part := upstream.split_flag(flag)[0]:
        names = upstream.option_names(upstream.PARTS[part][0](), part)
    else:
        fields = [*FIELDS, *(field for fields in upstream.megatron_fields().values() for field in fields)]
        names = [flag_of(field) for field in fields]
    # Whoever writes --trainer does not mean --no-trainer.
    names = [name for name in names if name.startswith("--no-") == flag.startswith("--no-")]
    # Without the dashes, which would make all short names alike.
    close = closest(flag.removeprefix("--"), [name.removeprefix("--") for name in names], cutoff=0.7)
    return f"; did you mean --{close}?" if close and f"--{close}" != flag else ""


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
    from fusionrl.compat.slime.translate import translate

    return translate(argv)


def slime_entry(name: str) -> Entry | None:
    """Return the entry of the slime flag `name`; None: slime does not have it, or fusionrl has it as well."""
    if not _may_be_slimes(name):
        return None
    from fusionrl.compat.slime.flags import TABLE

    return TABLE.get(name)


def slime_notes(accepted: dict[str, object]) -> list[str]:
    """Return a line for each reason for which accepted slime flags change nothing."""
    if not accepted:
        return []
    from fusionrl.compat.slime.translate import accepted_notes

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
