"""The command line, generated from the groups. Every mistake on it is collected and reported at once."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fusionrl.config.aliases import cure_for, setting_of, value_hint
from fusionrl.config.config import Config, PassThrough
from fusionrl.config.groups import GROUPS
from fusionrl.config.hooks import flag_of
from fusionrl.config.presets import with_preset
from fusionrl.config.switches import Switch, normalise_switches, switch_spellings
from fusionrl.upstream import flags as upstream

# Flags of the field whose work is still to come here: refused by name, never ignored.
COMING: dict[str, str] = {
    "max_staleness": "the asynchronous pipelines",
    "update_weights_interval": "the asynchronous pipelines",
    "multimodal_keys": "multimodal data",
    "use_wandb": "the W&B adapter (TensorBoard: --use-tensorboard)",
    "rollout_external_engine_addrs": "external engines",
}


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


def inner_type(info: FieldInfo) -> Any:
    """The field's type without Optional."""
    options = [t for t in typing.get_args(info.annotation) if t is not type(None)]
    is_optional = len(options) == 1 and type(None) in typing.get_args(info.annotation)
    return options[0] if is_optional else info.annotation


@functools.cache
def build_parser(prog: str = "fusionrl train") -> argparse.ArgumentParser:
    """argparse with one option a field. Values stay text: pydantic converts and checks them, all at once."""
    parser = _Parser(prog=prog, allow_abbrev=False, formatter_class=_Help)
    for name, model in GROUPS.items():
        group = parser.add_argument_group((model.__doc__ or name).strip())
        for field, info in model.model_fields.items():
            kind = inner_type(info)
            text = (info.description or "").replace("%", "%%")
            common: dict[str, Any] = {"dest": field, "default": argparse.SUPPRESS, "help": text}
            if kind is bool:
                group.add_argument(*switch_spellings(field), action=Switch, **common)
            elif typing.get_origin(kind) is list:
                group.add_argument(flag_of(field), nargs="*", metavar="VALUE", **common)
            else:
                choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
                metavar = "{" + ",".join(map(str, choices)) + "}" if choices else field.split("_")[-1].upper()
                # "?": a flag without its value becomes None, and is reported together with everything else.
                group.add_argument(flag_of(field), nargs="?", metavar=metavar, **common)
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # argparse's own takes -1e-3 for a flag
    return parser


def parse_args(argv: Sequence[str], prog: str = "fusionrl train") -> Config:
    """Turn a command line into a Config.

    Raises:
        CommandLineError: every unknown flag and every value that does not fit, each with flag, value and cure.
    """
    config, errors = read_args(argv, prog)
    if errors:
        raise CommandLineError(errors)
    return config


def read_args(argv: Sequence[str], prog: str = "fusionrl train") -> tuple[Config, list[str]]:
    """The Config of all that fits, and a message for each thing that does not; those flags keep their defaults."""
    errors: list[str] = []
    parsed, extras = build_parser(prog).parse_known_args(normalise_switches(argv, _switches(), errors))
    passthrough = _parse_extras(extras, errors)
    values = vars(parsed)
    if values.get("custom_config_path"):
        passthrough = passthrough.model_copy(update={"custom": _read_custom(values["custom_config_path"], errors)})
    for field, value in list(values.items()):
        if value is None or value == []:
            errors.append(f"{flag_of(field)}: it needs a value")
            del values[field]
        elif isinstance(value, str) and typing.get_origin(inner_type(_field_info(field))) is dict:
            try:
                values[field] = json.loads(value)
            except json.JSONDecodeError as error:
                errors.append(f"{flag_of(field)} {value}: not valid JSON ({error})")
                del values[field]
    given, values = set(values), with_preset(values)
    try:
        return Config.from_flat(values, passthrough, values.keys() - given), errors
    except ValidationError as error:
        errors.extend(_describe(item) for item in error.errors())
        fitting = {field: value for field, value in values.items() if field not in _bad_fields(error)}
        return Config.from_flat(fitting, passthrough, fitting.keys() - given), errors


def _read_custom(path: str, errors: list[str]) -> dict[str, Any]:
    """Read the values that --custom-config-path adds to the `args` of hooks."""
    import yaml  # tenths of a second: only where there is such a file

    where = f"--custom-config-path {path}"
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        errors.append(f"{where}: it cannot be read as YAML ({' '.join(str(error).split())})")
        return {}
    if not isinstance(found, dict):
        errors.append(f"{where}: it is no mapping of names to values")
        return {}
    flags = {field for model in GROUPS.values() for field in model.model_fields}
    for name in found:
        if not isinstance(name, str) or not name.isidentifier():
            errors.append(f"{where}: {name!r} is no name that `args` can have")
        elif name in flags:
            errors.append(f"{where}: {name} is a flag; give it on the command line, {flag_of(name)}")
    return {str(name): value for name, value in found.items() if name not in flags}


def _switches() -> list[str]:
    return [
        field for model in GROUPS.values() for field, info in model.model_fields.items() if inner_type(info) is bool
    ]


def _bad_fields(error: ValidationError) -> set[str]:
    return {str(part) for item in error.errors() for part in item["loc"][1:2]}


def _field_info(field: str) -> FieldInfo:
    return next(model.model_fields[field] for model in GROUPS.values() if field in model.model_fields)


def _describe(item: Any) -> str:
    field = str(item["loc"][1]) if len(item["loc"]) > 1 else str(item["loc"][0])
    value, kind = item.get("input"), inner_type(_field_info(field))
    is_choice = typing.get_origin(kind) is typing.Literal
    hint = value_hint(field, str(value), typing.get_args(kind)) if is_choice else ""
    return f"{flag_of(field)} {value}: {item['msg'][:1].lower()}{item['msg'][1:]}{hint}"


def _group_extras(extras: Sequence[str]) -> list[tuple[str, list[str]]]:
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


def _parse_extras(extras: Sequence[str], errors: list[str]) -> PassThrough:
    found: dict[str, dict[str, Any]] = {kind: {} for kind in PassThrough.model_fields}
    for flag, values in _group_extras(extras):
        field = flag[2:].replace("-", "_")
        shown = " ".join([flag, *values])
        cure = _cure(flag)
        try:
            if cure is not None:
                errors.append(f"{shown}: {cure}")
            elif not flag.startswith("--"):
                errors.append(f"{flag}: unexpected argument (flags begin with --)")
            elif field in COMING:
                errors.append(f"{shown}: not available yet ({COMING[field]} is still to come); leave it out")
            elif flag.startswith("--sglang-"):
                parsed = upstream.parse_with(
                    upstream.sglang_parser(), "--" + flag[len("--sglang-") :], values, upstream.SGLANG_OWNED
                )
                found["sglang"].update(parsed)
            elif flag.startswith("--router-"):
                parsed = upstream.parse_with(
                    upstream.router_parser(), "--" + flag[len("--router-") :], values, upstream.ROUTER_OWNED
                )
                found["router"].update(parsed)
            else:
                for kind, value in upstream.parse_megatron(field, values).items():
                    found[kind][field.removeprefix("no_") if value is False else field] = value
        except upstream.UpstreamError as error:
            errors.append(f"{shown}: {error}{_did_you_mean(flag)}")
        except KeyError:
            errors.append(f"{flag}: unknown flag{_did_you_mean(flag)}")
    return PassThrough(**found)


def _cure(flag: str) -> str | None:
    """Say what to write for a flag with underscores, or for another trainer's; None for any other flag."""
    plain = flag.removeprefix("--").replace("-", "_")
    fields = {field for model in GROUPS.values() for field in model.model_fields}
    if flag.startswith("--") and (plain in fields or plain.removeprefix("no_") in fields):
        return f"flags are written with dashes: --{plain.replace('_', '-')}"
    return cure_for(setting_of(flag) or flag)


def _did_you_mean(flag: str) -> str:
    names = [flag_of(field) for model in GROUPS.values() for field in model.model_fields]
    if flag.startswith("--sglang-"):
        names = upstream.option_names(upstream.sglang_parser(), "sglang")
    elif flag.startswith("--router-"):
        names = upstream.option_names(upstream.router_parser(), "router")
    else:
        names += [flag_of(field) for fields in upstream.megatron_fields().values() for field in fields]
    close = difflib.get_close_matches(flag, names, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close and close[0] != flag else ""
