"""Every flag's field by name: its group, its type, and the message for a value that it does not take. Pure."""

from __future__ import annotations

import typing
from typing import Any

from pydantic.fields import FieldInfo

from fusionrl.config.aliases import value_hint
from fusionrl.config.config import GROUPS
from fusionrl.config.hooks import flag_of

if typing.TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FIELDS: dict[str, FieldInfo] = {name: info for group in GROUPS.values() for name, info in group.model_fields.items()}
GROUP_OF: dict[str, str] = {name: title for title, group in GROUPS.items() for name in group.model_fields}


def inner_type(info: FieldInfo) -> Any:
    """Return the field's type without Optional."""
    options = [t for t in typing.get_args(info.annotation) if t is not type(None)]
    is_optional = len(options) == 1 and type(None) in typing.get_args(info.annotation)
    return options[0] if is_optional else info.annotation


def switches() -> list[str]:
    """Return the fields that are on/off flags."""
    return [field for field, info in FIELDS.items() if inner_type(info) is bool]


def own_name_error(name: object) -> str | None:
    """Return why the `args` of hooks cannot have a user's own value under this name; None where they can."""
    if not isinstance(name, str) or not name.isidentifier():
        return f"{name!r} is not a name that `args` can have"
    return f"{name} is a flag; give it on the command line, {flag_of(name)}" if name in FIELDS else None


def describe_error(field: str, item: ErrorDetails) -> str:
    """Return the message for a value that pydantic refused: flag, value, reason, and a hint for a choice."""
    value, kind = item.get("input"), inner_type(FIELDS[field])
    is_choice = typing.get_origin(kind) is typing.Literal
    hint = value_hint(field, str(value), typing.get_args(kind)) if is_choice else ""
    return f"{flag_of(field)} {value}: {item['msg'][:1].lower()}{item['msg'][1:]}{hint}"
