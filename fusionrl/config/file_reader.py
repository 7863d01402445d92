"""The keys of a config file (YAML, TOML or JSON), each with its line and with its value as it is written. Pure.

A value is kept twice. `text` is what a shell would hand to the flag, so that the flag's own type decides what `no`,
`1e-6` or `0755` means, not YAML. `typed` is what JSON would make of it, for flags that take JSON and for the parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Text: TypeAlias = "str | list[Text] | dict[str, Text] | None"
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# YAML 1.1's words; `y` and `n` are text to PyYAML, and so here.
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MAX_NODES = 20_000  # values of a file: nested aliases soon expand to millions


@dataclass(frozen=True)
class Setting:
    """One key of a file.

    place    file and line, as `run.yaml:3`
    text     the value as written: a text, a list of them, or None for null and for nothing at all
    typed    the value with JSON's types
    entries  the keys of a value that is a mapping
    """

    key: str
    place: str
    text: Text
    typed: Json
    entries: tuple[Setting, ...] = ()


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
