"""`--config FILE`: the flags of a YAML, TOML or JSON file, and a message with file and line for each mistake. Pure.

A key is a flag's name, with dashes or underscores. It may stand under the name of its group (`train: {lr: 1e-6}`), as
in the config.json that a run writes, which is read back in this way too. A value is kept twice. `text` is what a shell
would hand to the flag, so that the flag's own type decides what `no`, `1e-6` or `0755` means, not YAML. `typed` is what
JSON would make of it, for flags that take JSON and for the parts.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pydantic import ValidationError

from fusionrl.config import upstream_flags as upstream
from fusionrl.config.algorithm import with_preset
from fusionrl.config.config import FIELDS, GROUP_OF, GROUPS, Config, describe_error, inner_type, own_name_error
from fusionrl.config.hooks import flag_of
from fusionrl.config.passed_flags import FileFlags, empty_passthrough, parse_extra, slime_entry
from fusionrl.config.pipeline import CORRECTION_READS

Text: TypeAlias = "str | list[Text] | dict[str, Text] | None"
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# YAML 1.1's words; `y` and `n` are text to PyYAML, and so here.
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MAX_NODES = 20_000  # values of a file: nested aliases soon expand to millions


@dataclass(frozen=True)
class Setting:
    """One key of a file."""

    key: str
    place: str  # file and line, as `run.yaml:3`
    text: Text  # the value as written: a text, a list of them, or None for null and for nothing at all
    typed: Json  # the value with JSON's types
    entries: tuple[Setting, ...] = ()  # the keys of a value that is a mapping


class UnreadableFile(ValueError):
    """A file that cannot be read; the message begins with its place."""


def read_settings(path: str) -> tuple[list[Setting], list[str]]:
    """Return the settings of the file (.toml, .json, else YAML), and a message for each that is there twice."""
    errors: list[str] = []
    try:
        source = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UnreadableFile(f"--config {path}: it cannot be read ({reason})") from error
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".toml":
            return _toml_settings(path, source), errors
        if suffix == ".json":
            return _json_settings(path, source, errors), errors
        return _yaml_settings(path, source, errors), errors
    except RecursionError as error:
        raise UnreadableFile(f"{path}: it is nested too deeply") from error
    except UnreadableFile:
        raise
    except ValueError as error:  # Python neither reads nor shows a whole number of thousands of digits
        raise UnreadableFile(f"{path}: it cannot be read ({error})") from error


# ------------------------------------------------------------------------------------------------ YAML
def _yaml_settings(path: str, source: str, errors: list[str]) -> list[Setting]:
    import yaml  # tenths of a second: only where there is such a file

    try:
        root = yaml.compose(source, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UnreadableFile(f"{path}{line}: it is not valid YAML ({error.problem or error.context})") from error
    except yaml.YAMLError as error:
        raise UnreadableFile(f"{path}: it is not valid YAML ({' '.join(str(error).split())})") from error
    num_nodes = 0

    def settings_of(mapping: yaml.MappingNode) -> list[Setting]:
        settings: dict[str, Setting] = {}
        for key, value in mapping.value:
            place = f"{path}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                errors.append(f"{place}: a key is the name of a flag, not a list or a mapping")
            elif key.tag == "tag:yaml.org,2002:merge":  # it would be taken for a flag
                raise UnreadableFile(f"{place}: merge keys ({key.value}) are not read; write the keys themselves")
            elif key.value in settings:
                first = settings[key.value].place.rpartition(":")[2]
                errors.append(f"{place}: {key.value}: it stands on line {first} already")
            else:
                settings[key.value] = Setting(key.value, place, *value_of(value, place))
        return list(settings.values())

    def value_of(node: yaml.Node, place: str) -> tuple[Text, Json, tuple[Setting, ...]]:
        nonlocal num_nodes
        num_nodes += 1
        if num_nodes > _MAX_NODES:
            raise UnreadableFile(f"{place}: it has more than {_MAX_NODES:,} values, aliases written out")
        if isinstance(node, yaml.MappingNode):
            entries = tuple(settings_of(node))
            return {each.key: each.text for each in entries}, {each.key: each.typed for each in entries}, entries
        if isinstance(node, yaml.SequenceNode):
            items = [value_of(item, place) for item in node.value]
            return [text for text, _, _ in items], [typed for _, typed, _ in items], ()
        assert isinstance(node, yaml.ScalarNode)
        if node.tag == "tag:yaml.org,2002:null":
            return None, None, ()
        text = str(node.value)
        return text, text if node.style is not None else _plain(text), ()  # quoted, or a block of text

    if root is None:  # comments alone
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UnreadableFile(f"{path}:{root.start_mark.line + 1}: expected a mapping of flags to values")
    return settings_of(root)


def _plain(text: str) -> Json:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        number: Json = json.loads(text)
    except ValueError:
        return text
    return number if isinstance(number, int | float) else text


# ------------------------------------------------------------------------------------------------ TOML and JSON
def _toml_settings(path: str, source: str) -> list[Setting]:
    import tomllib  # milliseconds: only where there is such a file

    try:
        parsed = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        message, _, at = str(error).partition(" (at line ")
        line = at.partition(",")[0]
        raise UnreadableFile(f"{path}:{line or len(source.splitlines())}: it is not valid TOML ({message})") from error
    return _of_parsed(path, source.splitlines(), json.loads(json.dumps(parsed, default=str)), 0)  # TOML has dates


def _json_settings(path: str, source: str, errors: list[str]) -> list[Setting]:
    lines = source.splitlines()

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        mapping = dict(pairs)
        for key in [key for key in mapping if [name for name, _ in pairs].count(key) > 1]:
            first = _line_of(lines, key, 0)
            errors.append(f"{path}:{_line_of(lines, key, first)}: {key}: it stands on line {first} already")
        return mapping

    try:
        parsed = json.loads(source, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UnreadableFile(f"{path}:{error.lineno}: it is not valid JSON ({error.msg})") from error
    if not isinstance(parsed, dict):
        raise UnreadableFile(f"{path}:1: expected a mapping of flags to values")
    return _of_parsed(path, lines, parsed, 0)


def _of_parsed(path: str, lines: list[str], parsed: Mapping[str, Json], start: int) -> list[Setting]:
    """Return the settings of a mapping that begins on line `start` or after it; lines are found by their keys."""
    settings = []
    for key, value in parsed.items():
        line = _line_of(lines, key, start)
        entries = _of_parsed(path, lines, value, line - 1) if isinstance(value, dict) else ()
        settings.append(Setting(key, f"{path}:{line}", _as_text(value), value, tuple(entries)))
    return settings


def _line_of(lines: list[str], key: str, start: int) -> int:
    """Return the number of the first line from index `start` on that has the key: `key =`, `"key":` or `[key]`."""
    pattern = re.compile(rf"""(?<![\w-])["']?{re.escape(key)}["']?\s*[]=:.]""")
    return next((i + 1 for i in range(start, len(lines)) if pattern.search(lines[i])), start + 1)


def _as_text(value: Json) -> Text:
    if isinstance(value, dict):
        return {key: _as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


_PRESET_READS = ("algorithm", "rollout_max_response_len", "use_kl_loss")
_OF_ONE_START = ("resume", "dry_run", "in_process", "pdb")  # how a former run was started, not what it was
_HIDDEN = ":***@"  # for the password of an address in a run's config.json


def read_config_file(path: str, errors: list[str], overridden: Collection[str] = ()) -> FileFlags:
    """Return all that fits of the file; a message for each thing that does not goes to `errors`, or an UnreadableFile.

    overridden  names of the flags that the command line gives: a password that the file hides is not missed there.
    """
    settings, mistakes = read_settings(path)
    errors += mistakes
    flags = FileFlags(overridden=overridden)
    places: dict[str, str] = {}
    for setting in _without_sections(settings, flags, errors):
        name = setting.key.replace("-", "_")
        if name in places:
            errors.append(f"{setting.place}: {setting.key}: it is set at {places[name]} already")
            continue
        places[name] = setting.place
        try:
            _take(name, setting, flags)
        except ValueError as error:
            errors.append(f"{setting.place}: {error}")
    if flags.custom is not None:
        flags.values = _without_defaults(flags.values, flags.passed)
    return flags


def _without_sections(settings: list[Setting], flags: FileFlags, errors: list[str]) -> list[Setting]:
    """Return the settings with those of groups in place of the groups; `passthrough` is taken at once."""
    flat: list[Setting] = []
    is_of_a_run = any(setting.key == "passthrough" for setting in settings)
    for setting in settings:
        is_mapping = isinstance(setting.typed, dict)
        if setting.key == "passthrough" and is_mapping:
            _take_passthrough(setting, flags, errors)
        elif setting.key == "given" and is_of_a_run and isinstance(setting.typed, list):
            flags.passed = [str(name) for name in setting.typed]
        elif setting.key in GROUPS and is_mapping:
            flat += setting.entries
        else:
            flat.append(setting)
    return flat


def _take(name: str, setting: Setting, flags: FileFlags) -> None:
    key = setting.key
    if name in FIELDS:
        value = _value(name, setting) if _is_wanted(flag_of(name), setting.typed, name in flags.overridden) else None
        if value is not None:
            flags.values[name] = value
    elif name == "config":
        raise ValueError(f"{key}: a config file names no other; leave it out")
    elif name.removeprefix("no_") in FIELDS:
        raise ValueError(f"{key}: unknown key; write {name.removeprefix('no_').replace('_', '-')}: false")
    elif key.startswith("-"):
        raise ValueError(f"{key}: unknown key; write it without the dashes in front: {key.lstrip('-')}")
    else:
        _take_extra(name, setting, flags)


def _is_wanted(flag: str, value: object, is_overridden: bool) -> bool:
    """Return False for a value with a hidden password where the command line gives the flag; else it is an error."""
    if _HIDDEN not in str(value):
        return True
    if is_overridden:
        return False
    text = f"{flag} {value}" if isinstance(value, str) else flag
    raise ValueError(f"{text}: the password is not kept in a run's folder; write it, or give the flag")


def _value(name: str, setting: Setting) -> object:
    """Return the value of our flag `name` as the command line would give it; None: the flag keeps its default."""
    kind, flag, text = inner_type(FIELDS[name]), flag_of(name), setting.text
    if text is None:
        if FIELDS[name].get_default(call_default_factory=True) is None:
            return None
        raise ValueError(f"{flag}: it needs a value")
    value: object = text
    if kind is bool:
        if not isinstance(text, str) or text.lower() not in WORDS:
            raise ValueError(f"{flag} {text}: it is on or off; write true or false")
        value = WORDS[text.lower()]
    elif typing.get_origin(kind) is dict:
        value = setting.typed if isinstance(setting.typed, dict) else text
    elif typing.get_origin(kind) is list:
        value = text if isinstance(text, list) else [text]
        if value == [] and FIELDS[name].get_default(call_default_factory=True) is None:
            raise ValueError(f"{flag}: it needs a value")
    try:
        GROUPS[GROUP_OF[name]](**{name: value})
    except ValidationError as error:
        raise ValueError(describe_error(name, error.errors()[0])) from error
    return value


# ------------------------------------------------------------------------------------------------ flags of the parts
def _take_extra(name: str, setting: Setting, flags: FileFlags) -> None:
    """Put the value of a flag without a field into `flags.passthrough`, as the parser of its part reads it."""
    flag, typed, text = flag_of(name), setting.typed, setting.text
    if text is None:
        raise ValueError(parse_extra(flag, [], empty_passthrough()) or f"{flag}: it needs a value")
    is_switch = isinstance(typed, bool)
    part, option = upstream.split_flag(flag)
    if part and is_switch and upstream.is_switch(upstream.PARTS[part][0](), option):
        if not typed:
            return  # as without the flag: these have no spelling for off
        text = []
    if is_switch and isinstance(text, str):
        text = str(typed).lower()
    if isinstance(text, dict):
        text = json.dumps(typed)
    items = text if isinstance(text, list) else [text]
    values = [item if isinstance(item, str) else json.dumps(item) for item in items]
    parsed = empty_passthrough()
    if error := parse_extra(flag, values, parsed):
        raise ValueError(error)
    for kind, passed in parsed.items():
        is_wanted = {key: _is_wanted(flag, value, f"{kind}.{key}" in flags.overridden) for key, value in passed.items()}
        flags.passthrough[kind] |= {key: value for key, value in passed.items() if is_wanted[key]}


def _take_passthrough(setting: Setting, flags: FileFlags, errors: list[str]) -> None:
    flags.custom = {}
    for kind in setting.entries:
        if kind.key == "custom" and isinstance(kind.typed, dict):
            if "custom_config_path" not in flags.overridden:
                _take_custom(kind.entries, flags.custom, errors)
        elif kind.key == "slime" and isinstance(kind.typed, dict):
            flags.passthrough["slime"] |= {entry.key: entry.typed for entry in kind.entries if slime_entry(entry.key)}
        elif kind.key in flags.passthrough and isinstance(kind.typed, dict):
            for entry in kind.entries:
                name = f"{kind.key}.{entry.key}"
                try:
                    upstream.check_field(kind.key, entry.key)
                    flag = flag_of(f"{kind.key}_{entry.key}" if kind.key in upstream.PARTS else entry.key)
                    if _is_wanted(flag, entry.typed, name in flags.overridden):
                        flags.passthrough[kind.key][entry.key] = entry.typed
                except upstream.UpstreamError as error:
                    errors.append(f"{entry.place}: passthrough.{name}: {error}")
                except ValueError as error:
                    errors.append(f"{entry.place}: {error}")
        else:
            known = ", ".join(flags.passthrough)
            errors.append(f"{kind.place}: passthrough.{kind.key}: unknown key; known are {known}, each a mapping")


def _take_custom(entries: tuple[Setting, ...], custom: dict[str, Json], errors: list[str]) -> None:
    for entry in entries:
        if reason := own_name_error(entry.key):
            errors.append(f"{entry.place}: passthrough.custom.{entry.key}: {reason}")
        elif _HIDDEN in str(entry.typed):
            where = f"{entry.place}: passthrough.custom.{entry.key}"
            errors.append(f"{where}: the password is not kept in a run's folder; give --custom-config-path")
        else:
            custom[entry.key] = entry.typed


# ------------------------------------------------------------------------------------------------ a former run's file
def _without_defaults(values: dict[str, object], passed: Collection[str]) -> dict[str, object]:
    """Return the values of a run's config.json that its user chose: it has every flag, most with their defaults.

    --resume is dropped: otherwise the file could resume a run in another folder. A value that follows from a preset, or
    from --pipeline (--use-tis), is dropped as well, so that another --algorithm on the command line brings its own.
    Flags in `passed` stay.
    """
    reads = {name: values[name] for name in dict.fromkeys((*_PRESET_READS, *CORRECTION_READS)) if name in values}
    default, chosen = Config.from_flat(with_preset(reads)), {}
    for name, value in values.items():
        config, group = default, GROUP_OF[name]
        if name in reads:
            config = Config.from_flat(with_preset({key: reads[key] for key in reads if key != name}))
        is_default = getattr(GROUPS[group](**{name: value}), name) == config.value(name)
        if name not in _OF_ONE_START and (name in passed or not is_default):
            chosen[name] = value
    return chosen
