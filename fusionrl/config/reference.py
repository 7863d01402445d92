"""The flag reference, generated from the groups: `fusionrl flags > docs/reference/flags.md`."""

from __future__ import annotations

import typing

from pydantic.fields import FieldInfo

from fusionrl.config.fields import inner_type
from fusionrl.config.groups import GROUPS
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import CONFIG_FLAG_HELP
from fusionrl.config.passed_flags import COMING
from fusionrl.config.plan_flags import PLAN_FLAGS

_HEAD = """# Flags

Made by `fusionrl flags`; a test holds it against the code. Beside these, flags of the parts pass through under their
own names: `--sglang-*` (SGLang's ServerArgs), `--router-*` (sglang_router), and the fields of Megatron-core's
TransformerConfig, OptimizerConfig and DistributedDataParallelConfig. A field that several of Megatron's classes share
is set in all of them. What fusionrl sets itself is refused with the flag to use instead.

An on/off flag `--x` is turned on by `--x` or `--x=true`, and off by `--no-x` or `--x=false`. `--no-save` and
`--no-trainer` are flags of that name: `--no-save=false` turns one off again.

Flags that were given and do nothing in a run, and functions that it does not call, are named with the reason by
`fusionrl plan` and at the start of the run.
"""


def render_reference() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    for model in GROUPS.values():
        parts.append(f"\n## {(model.__doc__ or '').strip()}\n\n| flag | values | default | |\n|---|---|---|---|\n")
        for field, info in model.model_fields.items():
            text = (info.description or "").replace("|", "\\|")  # a bare bar would end the cell
            parts.append(f"| `{flag_of(field)}` | {_values(info)} | {_default(info)} | {text} |\n")
    parts.append("\n## The command line alone\n\n| flag | values | default | |\n|---|---|---|---|\n")
    parts.append(f"| `--config` | file |  | {CONFIG_FLAG_HELP} |\n")
    parts.append("\n## Of `fusionrl plan` alone\n\n| flag | values | default | |\n|---|---|---|---|\n")
    for flag, (values, default, text) in PLAN_FLAGS.items():
        parts.append(f"| `{flag}` | {values} | {f'`{default}`' if default else ''} | {text} |\n")
    parts.append("\n## Still to come\n\nRefused by name, never ignored: ")
    parts.append(", ".join(f"`{flag_of(field)}`" for field in sorted(COMING)) + ".\n")
    return "".join(parts)


def _values(info: FieldInfo) -> str:
    kind = inner_type(info)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return "values"
    if typing.get_origin(kind) is dict:
        return "JSON"
    return {"str": "text", "int": "integer", "float": "number", "bool": "on/off"}.get(kind.__name__, kind.__name__)


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"
