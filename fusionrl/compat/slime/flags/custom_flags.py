"""What of a launch no table of flags has: flags of a fork or of a user's own, and words that only the script knows.

slime adds the values of --custom-config-path to the `args` of hooks, next to the flags that a fork's parser has. Here
that file has those flags, too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusionrl.compat.slime.flags.table import TABLE
from fusionrl.compat.slime.flags.translate import name_of
from fusionrl.compat.slime.scripts.markers import expandable, left_parts, plain
from fusionrl.config import upstream_flags as upstream
from fusionrl.config.config import FIELDS, inner_type, switches
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import switch_spellings
from fusionrl.config.passed_flags import empty_passthrough, parse_extra

_MANY = 1000
_SPELLINGS = frozenset(spelling for name in switches() for spelling in switch_spellings(name))


@dataclass
class Apart:
    """A launch's arguments, divided.

    argv    flags of slime, of fusionrl and of the parts, with their values
    loose   words where a flag is expected, known only on the machine of the run: `${EXTRA_ARGS}`, `"$@"`
    custom  flags that none of them has, by their names in `args`
    hints   of these, a flag that has nearly the same name
    env     variables of --train-env-vars, which the printed script exports
    errors  why the launch cannot be translated
    """

    argv: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    custom: dict[str, object] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


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
