"""Flags for the files that slime reads by --sglang-config and --megatron-config-path. Pure."""

from collections.abc import Callable, Mapping, Sequence

from fusionrl.compat.slime.flags.translate import as_text, flag_groups
from fusionrl.config.config import FIELDS
from fusionrl.config.hooks import flag_of

_ROLES = {"regular": "generate", "prefill": "prefill", "decode": "decode"}
# Of one engine with data-parallel attention: an engine here is divided by tensor parallelism alone.
_DP_ATTENTION = frozenset({"dp_size", "enable_dp_attention", "enable_dp_lm_head", "moe_dense_tp_size"})


class NoFlagsError(ValueError):
    """A file that says what no flag here does."""


def with_flags(
    argv: Sequence[str], text_of: Callable[[str], str | None], note: Callable[[str], None]
) -> tuple[list[str], list[str]]:
    """Return a command line with the flags that do the same as such files, and the files that it no longer reads.

    text_of  the text of a file by its path; None: it is not there
    note     gets a line for each file. One that is not there, or that no flags replace, stays in the command line,
             where the table of flags refuses it
    """
    result, done = list(argv), []
    for flag, flags_of in _READERS.items():
        place = result.index(flag) if flag in result[:-1] else -1
        path = result[place + 1] if place >= 0 else ""
        text = text_of(path) if path else None
        if text is None:
            continue
        try:
            added = flags_of(_loaded(text))
        except NoFlagsError as error:
            note(f"{flag} {path}: {error}")
            continue
        result = [word for group in flag_groups(result) if group[0] not in (flag, *added) for word in group]
        written = [word for name, values in added.items() for word in (name, *values)]
        result += written
        done.append(path)
        note(f"{flag} {path}: it is {' '.join(written)}")
    return result, done


def _loaded(text: str) -> object:
    import yaml  # tenths of a second: only where there is such a file

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise NoFlagsError(f"it is not YAML ({error})") from error


def _entries(content: object, name: str) -> list[dict[str, object]]:
    entries = content.get(name) if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise NoFlagsError(f"expected a list of mappings under `{name}`")
    return entries


def _engine_groups(content: object) -> dict[str, list[str]]:
    """Return --engine-group for the groups of the one model, and --sglang-* for what its groups have alike."""
    models = _entries(content, "sglang")
    if len(models) != 1:
        raise NoFlagsError(f"it serves {len(models)} models; the engines of a run serve the policy alone")
    (model,) = models
    if unsupported := model.keys() - {"name", "num_gpus_per_engine", "server_groups", "update_weights"}:
        raise NoFlagsError(
            f"its model has {', '.join(sorted(unsupported))}; the engines of a run serve --hf-checkpoint"
        )
    if model.get("update_weights") is False:
        raise NoFlagsError("update_weights is false: the engines of a run get every push")
    # A placeholder is devices without an engine.
    groups = [group for group in _entries(model, "server_groups") if group.get("worker_type") != "placeholder"]
    if strange := [group.get("worker_type") for group in groups if group.get("worker_type") not in _ROLES]:
        raise NoFlagsError(f"worker_type {strange[0]}: the engines of a run are {', '.join(_ROLES)}")
    if not groups:
        raise NoFlagsError("it has no engines")
    overrides = [_overrides(group) for group in groups]
    overrides = [{name: value for name, value in options.items() if name not in _DP_ATTENTION} for options in overrides]
    alike = {
        name: value
        for name, value in overrides[0].items()
        if value is not False and all(name in options and options[name] == value for options in overrides)
    }
    flags = {flag_of(f"sglang_{name}"): [] if value is True else [as_text(value)] for name, value in alike.items()}
    texts = []
    for number, (group, options) in enumerate(zip(groups, overrides, strict=True), 1):
        kind = str(group["worker_type"])
        size = group.get("num_gpus_per_engine") or model.get("num_gpus_per_engine")
        items = {"num_gpus": group.get("num_gpus"), **({"per_engine": size} if size else {})}
        items |= {} if kind == "regular" else {"role": kind}
        items |= {name.replace("_", "-"): value for name, value in options.items() if name not in alike}
        texts.append(f"{kind}-{number}:{','.join(f'{name}={as_text(value)}' for name, value in items.items())}")
    return {**flags, "--engine-group": texts}


def _roles(content: object) -> dict[str, list[str]]:
    """Return the critic's flags, and the actor's own values."""
    flags: dict[str, list[str]] = {}
    for entry in _entries(content, "megatron"):
        role = entry.get("role")
        if role not in ("actor", "critic"):
            raise NoFlagsError(f"role {role}: the roles here are actor and critic")
        for name, value in _overrides(entry).items():
            field = f"critic_{name}" if role == "critic" else name
            if field not in FIELDS or isinstance(value, bool):
                raise NoFlagsError(f"{role} {name}: there is no {flag_of(field)} with a value")
            flags[flag_of(field)] = [as_text(value)]
    return flags


def _overrides(entry: Mapping[str, object]) -> dict[str, object]:
    overrides = entry.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        raise NoFlagsError("overrides: expected a mapping")
    return {str(name): value for name, value in overrides.items()}


_READERS: dict[str, Callable[[object], dict[str, list[str]]]] = {
    "--sglang-config": _engine_groups,
    "--megatron-config-path": _roles,
}
