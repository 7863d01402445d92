"""The command line, generated from the groups, and texts on its flags: the reference page and the template of a file.

All mistakes are reported together.
"""

import argparse
import functools
import json
import re
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fusionrl.base.wording import attempt
from fusionrl.config.algorithm import with_preset
from fusionrl.config.config import (
    FIELDS,
    GROUPS,
    Config,
    PassThrough,
    describe_error,
    inner_type,
    own_name_error,
    switches,
)
from fusionrl.config.engine_groups import devices_of_groups
from fusionrl.config.hooks import flag_of
from fusionrl.config.passed_flags import FileFlags, parse_extras, translate_slime_flags
from fusionrl.observe.run_dir import own_config_file

CONFIG_FLAG_HELP = (
    "YAML, TOML or JSON file of flags, also the config.json of a former run. Flags on the command line override it."
    " See docs/guides/recipes.md."
)

_REPEATED = ("engine_group",)  # given twice, both count


class CommandLineError(ValueError):
    """Everything that is wrong with a command line; `errors` has one message a mistake."""

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(self.errors))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise CommandLineError([message])


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == argparse.OPTIONAL:  # to argparse optional, to a user not
            return self._metavar_formatter(action, default_metavar)(1)[0]
        return super()._format_args(action, default_metavar)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return action.shown() if isinstance(action, Switch) else super()._format_action_invocation(action)


@functools.cache
def build_parser(prog: str = "fusionrl train") -> argparse.ArgumentParser:
    """argparse with one option a field. Values stay text: pydantic converts and checks them, all at once."""
    parser = _Parser(prog=prog, allow_abbrev=False, formatter_class=_Help)
    parser.add_argument(
        "--config", nargs="?", action="append", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_FLAG_HELP
    )
    for name, model in GROUPS.items():
        group = parser.add_argument_group((model.__doc__ or name).strip())
        for field, info in model.model_fields.items():
            kind = inner_type(info)
            text = (info.description or "").replace("%", "%%")
            common: dict[str, Any] = {"dest": field, "default": argparse.SUPPRESS, "help": text}
            if kind is bool:
                group.add_argument(*switch_spellings(field), action=Switch, **common)
            elif typing.get_origin(kind) is list:
                action = "extend" if field in _REPEATED else "store"
                group.add_argument(flag_of(field), nargs="*", metavar="VALUE", action=action, **common)
            else:
                choices = _choices(info)
                metavar = "{" + ",".join(map(str, choices)) + "}" if choices else field.split("_")[-1].upper()
                # "?": a flag without its value becomes None, and is reported together with everything else.
                group.add_argument(flag_of(field), nargs="?", metavar=metavar, **common)
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # argparse's own takes -1e-3 for a flag
    return parser


def parse_args(argv: Sequence[str], prog: str = "fusionrl train") -> Config:
    """Turn a command line into a Config. CommandLineError: every mistake, each with flag, value and cure."""
    config, errors = read_args(argv, prog)
    if errors:
        raise CommandLineError(errors)
    return config


class CommandLine(typing.NamedTuple):
    """A command line as it was read.

    config  of all that fits; flags that do not keep their defaults
    errors  a message for each thing that does not fit
    notes   what a user should know of flags that come from elsewhere
    file    of --config
    """

    config: Config
    errors: list[str]
    notes: list[str]
    file: str | None


def read_args(argv: Sequence[str], prog: str = "fusionrl train") -> tuple[Config, list[str]]:
    """Return the Config and the errors of `read_command_line`."""
    return read_command_line(argv, prog)[:2]


def read_command_line(argv: Sequence[str], prog: str = "fusionrl train") -> CommandLine:
    """Read all flags, and the file that has more of them.

    CommandLineError: the file of --config cannot be read. Most flags are in it, so no other check makes sense.
    """
    errors: list[str] = []
    translated = translate_slime_flags(argv)
    errors += translated.errors
    parsed, extras = build_parser(prog).parse_known_args(normalise_switches(translated.argv, switches(), errors))
    passthrough = parse_extras(extras, errors, translated.accepted)
    values = vars(parsed)
    notes = [f"slime's flags: {note}" for note in translated.notes]
    paths, own_file = values.pop("config", []), None
    if paths:
        own_file = paths[-1]
    elif former := _former_file(values):
        paths = [former]
        notes.insert(0, f"--resume: flags that are not given are those of {former}")
    parts = passthrough.model_dump()
    overridden = {*values, *(f"{kind}.{name}" for kind, passed in parts.items() for name in passed)}
    file = _read_file(paths, overridden, errors)
    if own_file is None or values.get("resume"):  # a resume of a run that followed a record continues without it
        file.values.pop("replay_schedule", None)
    custom_path = values.get("custom_config_path")
    if file.custom is None:  # else the values are those of a former run
        custom_path = custom_path or file.values.get("custom_config_path")
    custom = _read_custom(str(custom_path), errors) if custom_path else file.custom
    over = {name: value for name, value in (custom or {}).items() if name in FIELDS and custom_path}
    custom = {name: value for name, value in (custom or {}).items() if name not in over}
    values |= over
    for field, value in list(values.items()):
        if value is None or value == []:
            errors.append(f"{flag_of(field)}: it needs a value")
            del values[field]
    passed = {kind: file.passthrough[kind] | getattr(passthrough, kind) for kind in file.passthrough}
    passthrough = PassThrough(**{**passed, "custom": dict(custom or {})})
    passed_names = file.values.keys() | values.keys()
    values = with_preset(file.values | values)
    values |= attempt(errors, lambda: devices_of_groups(values)) or {}
    try:
        config = Config.from_flat(values, passthrough, values.keys() - passed_names)
    except ValidationError as error:
        items = [(str(item["loc"][:2][-1]), item) for item in error.errors()]  # a place is (group, field, …)
        errors += [describe_error(field, item) for field, item in items]
        fitting = {field: value for field, value in values.items() if field not in dict(items)}
        config = Config.from_flat(fitting, passthrough, fitting.keys() - passed_names)
    return CommandLine(config, errors, notes, own_file)


def _former_file(values: Mapping[str, object]) -> str | None:
    """Return the file with the flags of the run that a short command line with --resume continues.

    A command line that names the model (or a file, with --config) is complete: a flag that it leaves out has its
    default. Without --hf-checkpoint it could start nothing, so every missing flag comes from the run.
    """
    if not values.get("resume") or not values.get("run_dir") or "hf_checkpoint" in values:
        return None
    file = own_config_file(Path(str(values["run_dir"])))
    return None if file is None else str(file)


def _read_file(paths: Sequence[str | None], overridden: Collection[str], errors: list[str]) -> FileFlags:
    if not paths:
        return FileFlags()
    from fusionrl.config.config_file import UnreadableFile, read_config_file

    if None in paths:
        errors.append("--config: it needs a value")
    elif len(paths) > 1:
        errors.append(f"--config {' '.join(map(str, paths))}: only one file is read; put all flags into one")
    try:
        return read_config_file(paths[-1], errors, overridden) if paths[-1] is not None else FileFlags()
    except UnreadableFile as error:
        raise CommandLineError([str(error)]) from error


def _read_custom(path: str, errors: list[str]) -> dict[str, object]:
    """Read the values that --custom-config-path adds to the `args` of hooks; those of flags go over the flags."""
    import yaml  # tenths of a second: only where there is such a file

    where = f"--custom-config-path {path}"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        errors.append(f"{where}: it cannot be read as YAML ({' '.join(str(error).split())})")
        return {}
    if not isinstance(content, dict):
        errors.append(f"{where}: expected a mapping of names to values")
        return {}
    for name in content:
        if name not in FIELDS and (reason := own_name_error(name)):
            errors.append(f"{where}: {reason}")
    return {str(name): value for name, value in content.items() if name != "custom_config_path"}


_VALUES = {"true": True, "false": False}


def switch_spellings(field: str) -> dict[str, bool]:
    """Every spelling of the switch `field`, and the value that it gives the field.

    `colocate` → --colocate and --no-colocate; `no_save` → --no-save alone, since --save does not exist. Both also take
    their value after `=`: --colocate=false, --no-save=false.
    """
    flag = "--" + field.replace("_", "-")
    spellings = {flag: True}
    if not field.startswith("no_"):
        spellings["--no-" + flag[2:]] = False
    return spellings | {f"{flag}={text}": value for text, value in _VALUES.items()}


def spell(field: str, value: object) -> str:
    """The shortest spelling that gives a flag this value: `--lr 0.1`, `--colocate`, `--no-colocate`, `--no-save`."""
    if not isinstance(value, bool):
        return f"--{field.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
    return next(spelling for spelling, meaning in switch_spellings(field).items() if meaning == value)


class Switch(argparse.Action):
    """An option without a value: each of its spellings means on or off (see `switch_spellings`)."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None, "a switch is not a positional argument"
        setattr(namespace, self.dest, switch_spellings(self.dest)[option_string])

    def format_usage(self) -> str:
        return self.shown(" | ")

    def shown(self, separator: str = ", ") -> str:
        """The spellings that help shows: those without `=`."""
        return separator.join(spelling for spelling in self.option_strings if "=" not in spelling)


def normalise_switches(argv: Sequence[str], fields: Sequence[str], errors: list[str]) -> list[str]:
    """`argv` with the values of switches in lower case (`--colocate=True` → `--colocate=true`).

    A value that a switch does not take is left out and reported in `errors`.
    """
    spelled = {spelling: field for field in fields for spelling in switch_spellings(field)}
    tokens: list[str] = []
    rest = iter([*argv, None])
    token = next(rest)
    while token is not None:
        following = next(rest)
        flag, separator, value = token.partition("=")
        field = spelled.get(flag)
        if field is None or not separator:
            tokens.append(token)
            if field is not None and following is not None and following.lower() in _VALUES:
                errors.append(f"{token} {following}: a value of a switch stands after =: {token}={following.lower()}")
                following = next(rest)
        elif f"{flag}={value.lower()}" in spelled:
            tokens.append(f"{flag}={value.lower()}")
        else:
            errors.append(f"{token}: it is switched on by {spell(field, True)} and off by {spell(field, False)}")
        token = following
    return tokens


# ------------------------------------------------------------------------------------------------ texts on flags
_HEAD = """# Flags

Generated by `fusionrl flags`; a test compares it with the code. Flags of SGLang, its router and Megatron-core pass
through under their own names: `--sglang-*` (SGLang's ServerArgs), `--router-*` (sglang_router), and the fields of
Megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig. A field that several Megatron-core
classes share is set in all of them. A field that fusionrl sets itself is an error that names the flag to use instead.

An on/off flag `--x` is turned on by `--x` or `--x=true`, and off by `--no-x` or `--x=false`. `--no-save` and
`--no-trainer` are flags of that name: `--no-save=false` turns one off again.

`fusionrl plan` and the start of a run list the flags that have no effect in this run and the functions that it does
not call, each with the reason.
"""
_TEMPLATE_HEAD = """\
# Flags of a run: fusionrl train --config FILE
#
# Each flag below has its default, if there is one. Remove the # from the flags that you set.
# Flags on the command line override this file. docs/guides/recipes.md has the details.
"""
_WIDTH = 118


def render_reference() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    head = "\n\n| flag | values | default | |\n|---|---|---|---|\n"
    for model in GROUPS.values():
        parts.append(f"\n## {(model.__doc__ or '').strip()}{head}")
        for field, info in model.model_fields.items():
            text = (info.description or "").replace("|", "\\|")  # a bare bar would end the cell
            parts.append(f"| `{flag_of(field)}` | {_values(info)} | {_default(info)} | {text} |\n")
    parts.append(f"\n## The command line alone{head}| `--config` | file |  | {CONFIG_FLAG_HELP} |\n")
    return "".join(parts)


def _choices(info: FieldInfo) -> tuple[object, ...]:
    kind = inner_type(info)
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def _values(info: FieldInfo) -> str:
    """Return the flag's type with its bounds, or its choices."""
    kind = inner_type(info)
    name = (typing.get_origin(kind) or kind).__name__
    names = {"str": "text", "int": "integer", "float": "number", "bool": "on/off", "list": "values", "dict": "JSON"}
    bounds = [
        f"{sign} {value:g}"
        for part in info.metadata
        for bound, sign in _BOUNDS.items()
        if (value := getattr(part, bound, None)) is not None
    ]
    return ", ".join(f"`{choice}`" for choice in _choices(info)) or " ".join([names[name], ", ".join(bounds)]).strip()


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or value in ([], {}) else f"`{value}`"


def render_template() -> str:
    """Return the whole file as YAML: each flag in a comment, under its help text, with its default."""
    parts = [_TEMPLATE_HEAD]
    for group in GROUPS.values():
        title = (group.__doc__ or "").strip()
        parts.append(f"\n# {'-' * (_WIDTH - 3 - len(title))} {title}\n")
        for field, info in group.model_fields.items():
            choices, value = ", ".join(map(str, _choices(info))), info.get_default(call_default_factory=True)
            text = f"{info.description or ''}{f' [{choices}]' if choices else ''}"
            parts += [f"# {line}\n" for line in textwrap.wrap(text, _WIDTH - 2)]
            default = value if isinstance(value, str) and value else json.dumps(value)  # as YAML and JSON both write it
            parts.append(f"#{field.replace('_', '-')}:{'' if value is None else f' {default}'}\n")
    return "".join(parts)


def main(argv: Sequence[str]) -> int:
    """`fusionrl flags [--template]`: print the page, or the commented file; return the exit code."""
    print(render_template() if list(argv) == ["--template"] else render_reference(), end="")
    return 0
