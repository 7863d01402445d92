"""Arguments of a launch beyond the tables of flags: unknown parts, files of flags, a fork's own flags. Pure.

A part that only the machine of the run knows (`${NAME}`, `$(date)`) stays in the text as the script has it, between
OPEN and CLOSE, so that a printed command can have it back.

slime adds the values of --custom-config-path to the `args` of hooks, next to the flags that a fork's parser has. Here
that file has those flags, too.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fusionrl.compat.slime.flags import TABLE, as_text, flag_groups, name_of
from fusionrl.config import upstream_flags as upstream
from fusionrl.config.config import FIELDS, inner_type, switches
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import switch_spellings
from fusionrl.config.passed_flags import empty_passthrough, parse_extra

OPEN, CLOSE = "\ue000", "\ue001"
# While the script runs, punctuation within a part is moved here, so that a shell that reads it again leaves it alone.
_AWAY = 0xE100
_RUNNING = {code: code + _AWAY for code in range(128) if not chr(code).isalnum() and chr(code) != "_"}
_STOPPED = {running: code for code, running in _RUNNING.items()}

_LEFT = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
# A part that double quotes of a printed command may have as it is, because nothing in it ends them.
_QUOTED = r"""'[^']*'|"(?:[^"\\`$]|\\.|\$(?!\())*"|\\."""
_PLAIN = rf"""[^()'"\\`#<]|(?<=\w)#|<(?!<)|{_QUOTED}"""
_PART = re.compile(rf"\$\{{\w+\}}|\$(?:\d+|@)|\$\((?:{_PLAIN}|\((?:{_PLAIN})*\))*\)", re.ASCII | re.DOTALL)
_SAFE = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


def left(source: str) -> str:
    """Return the text for a part that is left as it is."""
    return OPEN + source + CLOSE


def running(source: str) -> str:
    """Return a part that is left as it is, as the script has it while it runs."""
    return OPEN + source.translate(_RUNNING) + CLOSE


def stopped(text: str) -> str:
    """Return text of a script that has run, with its parts as `left` makes them; other marked text is plain."""
    parts = enumerate(_LEFT.split(text.translate(_STOPPED)))
    return "".join(left(part) if place % 2 and _PART.fullmatch(part) else plain(part) for place, part in parts)


def plain(text: str) -> str:
    """Return the text without the marks of parts that are left."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def left_parts(text: str) -> list[str]:
    """Return the parts that are left as they are."""
    return _LEFT.findall(text)


def quoted(text: str) -> str:
    """Return the word quoted for a shell: unknown parts are in double quotes, so that the shell expands them."""
    if not left_parts(text):
        return text if _SAFE.fullmatch(text) else shlex.quote(text)
    return f'"{expandable(text)}"'


def expandable(text: str, special: str = r'[\\"$`]') -> str:
    """Return the text as double quotes have it, or a here-document, in which other characters are `special`."""
    parts = _LEFT.split(text)
    return "".join(part if position % 2 else re.sub(special, r"\\\g<0>", part) for position, part in enumerate(parts))


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


_MANY = 1000
_SPELLINGS = frozenset(spelling for name in switches() for spelling in switch_spellings(name))


@dataclass
class Apart:
    """A launch's arguments, divided."""

    argv: list[str] = field(default_factory=list)  # flags of slime, of fusionrl and of the parts, with their values
    loose: list[str] = field(default_factory=list)  # in place of flags, not known here: `${EXTRA_ARGS}`, `"$@"`
    custom: dict[str, object] = field(default_factory=dict)  # flags that none of them has, by their names in `args`
    hints: dict[str, str] = field(default_factory=dict)  # of these, a flag that has nearly the same name
    env: dict[str, str] = field(default_factory=dict)  # of --train-env-vars, which the printed script exports
    errors: list[str] = field(default_factory=list)  # why the launch cannot be translated


def set_apart(argv: Sequence[str]) -> Apart:
    """Divide the arguments of a launch."""
    apart = Apart()
    for flag, values in _grouped(argv, apart.loose):
        if flag == "--train-env-vars" and (variables := _variables(values)) is not None:
            apart.env |= variables
            continue
        option, equals, value = flag.partition("=")
        name = name_of(flag)
        error = None
        if not (flag in _SPELLINGS or name in TABLE or (name in FIELDS and option == flag_of(name))):
            error = parse_extra(option, [plain(word) for word in values], empty_passthrough())
        if error is None or not error.startswith(f"{option}: unknown flag") or not name.isidentifier():
            apart.argv += [flag, *values]
            continue
        apart.custom[name] = _value([value, *values] if equals else values)
        if "did you mean" in error:
            apart.hints[name] = error.rpartition(" ")[2].rstrip("?")
    if apart.loose and not any(word.startswith("--") or plain(word) == "$@" for word in argv):
        apart.errors.append(
            f"{' '.join(map(plain, apart.loose))}: no flag of the launch is known; give --set NAME=VALUE"
        )
    return apart


def _grouped(argv: Sequence[str], loose: list[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with its values; words that are neither go to `loose`, or stay with the flag before them."""
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            groups.append((word, []))
        elif left_parts(word) == [plain(word)] and (not groups or not _takes_more(*groups[-1], word)):
            loose.append(word)
        elif groups:
            groups[-1][1].append(word)
        else:
            groups.append((word, []))
    return groups


def _takes_more(flag: str, values: Sequence[str], word: str) -> bool:
    if "=" in flag:
        return False
    num_values = _num_values(flag)
    return len(values) < num_values and (num_values > 1 or plain(word) != "$@")


def _num_values(flag: str) -> int:
    """Return how many values a flag takes at most."""
    name = name_of(flag)
    if (entry := TABLE.get(name)) is not None:
        return entry.arity % _MANY
    if name in FIELDS:
        kind = inner_type(FIELDS[name])
        return 0 if kind is bool else _MANY if "list" in str(kind) else 1
    if flag.startswith("--sglang-"):
        return upstream.num_values(upstream.sglang_parser(), "--" + flag[len("--sglang-") :]) % _MANY
    hints = [fields[name] for fields in upstream.megatron_fields().values() if name in fields]
    return 0 if hints and hints[0] is bool else 1


def _variables(values: Sequence[str]) -> dict[str, str] | None:
    """Return the variables that a JSON text sets; None for any other text."""
    try:
        settings = json.loads(" ".join(values))
    except ValueError:
        return None
    is_plain = isinstance(settings, dict) and all(name.isidentifier() for name in settings)
    return {name: str(value) for name, value in settings.items()} if is_plain else None


def _value(values: Sequence[str]) -> object:
    """Return what `args` has: a switch is True, a number a number, several values a list; all else is text."""
    if len(values) != 1:
        return [_value([value]) for value in values] if values else True
    (text,) = values
    if re.fullmatch(r"[-+]?(0|[1-9]\d*)", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text) and not re.fullmatch(r"0\d+", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def custom_file(values: Mapping[str, object], path: str, former: str | None = None) -> list[str]:
    """Return the lines of a shell that write `values` as YAML to `path`.

    former  the file of the launch's own --custom-config-path, as a shell takes it; its values go over these
    """
    text = "\n".join(f"{name}: {_yaml(value)}" for name, value in values.items())
    return written_file(path, text, f"cat - {former}" if former else "cat")


def written_file(path: str, text: str, command: str = "cat") -> list[str]:
    """Return the lines of a shell that write `text` to `path`; parts of it that are not known expand there."""
    is_plain = not left_parts(text)
    end = "'EOF'" if is_plain else "EOF"
    lines = (text if is_plain else expandable(text, r"[\\$`]")).removesuffix("\n").split("\n")
    return [f"{command} > {path} <<{end}", *lines, "EOF"]


def _yaml(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, str) and left_parts(value) == [plain(value)]:
        return value  # a number, or text that YAML takes as it is
    if isinstance(value, float):
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")  # a float in YAML has a point
    return json.dumps(value, ensure_ascii=False)
