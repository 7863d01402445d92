"""`--config FILE`: the flags that a config file gives, and a message with file and line for each mistake in it. Pure.

A key is a flag's name, with dashes or underscores. It may stand under the name of its group (`train: {lr: 1e-6}`), as
in the config.json that a run writes, which is read back in this way too.
"""

import json
import typing
from collections.abc import Collection
from dataclasses import dataclass, field

from pydantic import ValidationError

from fusionrl.config import upstream_flags as upstream
from fusionrl.config.config import GROUPS, Config
from fusionrl.config.fields import FIELDS, GROUP_OF, describe_error, inner_type, own_name_error
from fusionrl.config.file_reader import WORDS, Json, Setting, read_settings
from fusionrl.config.hooks import flag_of
from fusionrl.config.off_policy import READS
from fusionrl.config.passed_flags import empty_passthrough, parse_extra
from fusionrl.config.plan_flags import PLAN_FLAGS
from fusionrl.config.presets import with_preset
from fusionrl.config.slime_flags import slime_entry

_PRESET_READS = ("algorithm", "rollout_max_response_len", "use_kl_loss")
_OF_ONE_START = ("resume", "dry_run", "in_process", "pdb")  # how a former run was started, not what it was
_HIDDEN = ":***@"  # for the password of an address in a run's config.json


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
    custom: dict[str, Json] | None = None
    overridden: Collection[str] = ()
    passed: Collection[str] = ()


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
    elif flag_of(name) in PLAN_FLAGS:
        raise ValueError(f"{key}: it belongs to the command line of `fusionrl plan`: {flag_of(name)}")
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
    if not _hides_password(value):
        return True
    if is_overridden:
        return False
    text = f"{flag} {value}" if isinstance(value, str) else flag
    raise ValueError(f"{text}: the password is not kept in a run's folder; write it, or give the flag")


def _hides_password(value: object) -> bool:
    if isinstance(value, dict):
        return any(_hides_password(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return any(map(_hides_password, value))
    return isinstance(value, str) and _HIDDEN in value


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
        elif _hides_password(entry.typed):
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
    reads = {name: values[name] for name in dict.fromkeys((*_PRESET_READS, *READS)) if name in values}
    default, chosen = Config.from_flat(with_preset(reads)), {}
    for name, value in values.items():
        config, group = default, GROUP_OF[name]
        if name in reads:
            config = Config.from_flat(with_preset({key: reads[key] for key in reads if key != name}))
        is_default = getattr(GROUPS[group](**{name: value}), name) == getattr(getattr(config, group), name)
        if name not in _OF_ONE_START and (name in passed or not is_default):
            chosen[name] = value
    return chosen
