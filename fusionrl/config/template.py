"""`fusionrl flags --template`: a commented file for `--config`, made from the groups. Pure."""

from __future__ import annotations

import json
import textwrap
import typing

from pydantic.fields import FieldInfo

from fusionrl.config.fields import inner_type
from fusionrl.config.groups import GROUPS

_HEAD = """\
# Flags of a run: fusionrl train --config FILE
#
# Each flag below stands with its default, if it has one. Take the # away from those that you set.
# Flags on the command line go before this file. docs/guides/recipes.md has the details.
"""
_WIDTH = 118


def render_template() -> str:
    """Return the whole file as YAML: each flag in a comment, under its help text, with its default."""
    parts = [_HEAD]
    for group in GROUPS.values():
        title = (group.__doc__ or "").strip()
        parts.append(f"\n# {'-' * (_WIDTH - 3 - len(title))} {title}\n")
        for field, info in group.model_fields.items():
            text = f"{info.description or ''}{_choices(info)}"
            parts += [f"# {line}\n" for line in textwrap.wrap(text, _WIDTH - 2)]
            parts.append(f"#{field.replace('_', '-')}:{_default(info)}\n")
    return "".join(parts)


def _choices(info: FieldInfo) -> str:
    kind = inner_type(info)
    is_choice = typing.get_origin(kind) is typing.Literal
    return f" [{', '.join(map(str, typing.get_args(kind)))}]" if is_choice else ""


def _default(info: FieldInfo) -> str:
    """Return the default with a space before it, as YAML and JSON both write it; nothing for None."""
    value = info.get_default(call_default_factory=True)
    if value is None:
        return ""
    return f" {value}" if isinstance(value, str) and value else f" {json.dumps(value)}"
