"""The base of all groups of flags, and the declaration of a flag with the runs in which it acts."""

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from fusionrl.config import scopes
from fusionrl.config.scopes import Scope


class Group(BaseModel):
    """Base of every group: strict, frozen, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def _from_json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("json", "not valid JSON ({error})", {"error": str(error)}) from error


JsonObject = Annotated[dict[str, Any], BeforeValidator(_from_json)]


def acting(*where: Scope) -> Callable[..., Any]:
    """Return what declares flags that act where all these scopes hold: by default, help and `pydantic.Field` bounds."""

    def declare(default: object, text: str, /, **bounds: Any) -> Any:
        return Field(default, description=text, json_schema_extra={"scopes": where}, **bounds)  # type: ignore

    return declare


def scopes_of(info: FieldInfo) -> tuple[Scope, ...]:
    """Return the scopes in which a declared flag acts."""
    assert isinstance(info.json_schema_extra, dict), "a flag is declared by `acting`"
    where: Any = info.json_schema_extra["scopes"]
    return tuple(where)


always = acting()
of_engines = acting(scopes.ENGINES)
of_trainers = acting(scopes.TRAINERS)
of_training = acting(scopes.TRAINS)
of_policy = acting(scopes.POLICY)
of_rl = acting(scopes.RL)
of_rl_training = acting(scopes.TRAINS, scopes.RL)
of_pushes = acting(scopes.PUSHES)
of_steps = acting(scopes.STEPS)
of_scores = acting(scopes.SCORES)
of_prompts = acting(scopes.PROMPTS)
of_eval_engines = acting(scopes.EVALUATES, scopes.HAS_SETS)
