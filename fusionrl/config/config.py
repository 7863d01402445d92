"""`Config`: every group of flags, and what is passed through to SGLang, the router and Megatron-core.

FIELDS has each flag's field by name: its type, default, bounds, help and scopes are declared there and nowhere else.
"""

from __future__ import annotations

import argparse
import copy
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator
from pydantic.fields import FieldInfo

from fusionrl.config.algorithm import AlgorithmGroup, CriticGroup, PrmGroup
from fusionrl.config.hooks import flag_of
from fusionrl.config.model import LoraGroup, ModelGroup, TrainGroup, WeightsGroup
from fusionrl.config.pipeline import PipelineGroup, with_default
from fusionrl.config.rollout import DataGroup, EvalGroup, RejectSamplingGroup, RewardGroup, RolloutGroup
from fusionrl.config.run import CheckpointGroup, ClusterGroup, PlanGroup, RunGroup
from fusionrl.config.scopes import Group

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class PassThrough(Group):
    """Flags that belong to the parts: upstream's own field names, only those the user set."""

    custom: dict[str, Any] = Field(default_factory=dict, description="A user's own, for hooks (--custom-config-path).")
    sglang: dict[str, Any] = Field(default_factory=dict, description="SGLang ServerArgs fields (--sglang-*).")
    router: dict[str, Any] = Field(default_factory=dict, description="Router arguments (--router-*).")
    transformer: dict[str, Any] = Field(default_factory=dict, description="Megatron TransformerConfig fields.")
    optimizer: dict[str, Any] = Field(default_factory=dict, description="Megatron OptimizerConfig fields.")
    ddp: dict[str, Any] = Field(default_factory=dict, description="Megatron DistributedDataParallelConfig fields.")
    slime: dict[str, Any] = Field(
        default_factory=dict, description="Accepted flags from slime's launch scripts: compared, or without effect."
    )

    @field_validator("optimizer")
    @classmethod
    def _offload_all(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Offload the whole optimizer unless a fraction is given.

        Megatron's parser has 1.0 as the default, its class 0.0, which offloads nothing.
        """
        is_open = fields.get("optimizer_cpu_offload") and "optimizer_offload_fraction" not in fields
        return {**fields, "optimizer_offload_fraction": 1.0} if is_open else fields


def _number(value: object) -> object:
    """Return the number that a text of the command line is; anything else as it is."""
    for kind in (int, float):
        try:
            return kind(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return value


class HookArgs(argparse.Namespace):
    """`args` of a hook: a flat namespace that may be written on, copied and deep-copied.

    A deep copy has the same SHARED objects, which belong to the process and the rollout that made them.
    """

    def __getattr__(self, name: str) -> object:
        """Return the default of an SGLang server argument that was not given (`sglang_…`), as slime does."""
        if name.startswith("sglang_"):
            from fusionrl.config.upstream_flags import sglang_parser

            action = next((option for option in sglang_parser()._actions if f"sglang_{option.dest}" == name), None)
            if action is not None:
                return action.default
        raise AttributeError(f"args has no {name!r}: neither a flag nor a slime name (docs/guides/from-slime.md)")

    SHARED = (
        *("semaphore", "generate_client", "abort_event", "is_stopping", "generate_state", "client_loop"),
        "begun_samples",
    )

    def __deepcopy__(self, memo: dict[int, object]) -> HookArgs:
        return HookArgs(
            **{name: value if name in self.SHARED else copy.deepcopy(value, memo) for name, value in vars(self).items()}
        )


class Config(Group):
    """The whole configuration of a run; frozen. Everything derived from it is in the Plan."""

    run: RunGroup = Field(default_factory=RunGroup)
    pipelining: PipelineGroup = Field(default_factory=PipelineGroup)
    cluster: ClusterGroup = Field(default_factory=ClusterGroup)
    model: ModelGroup = Field(default_factory=ModelGroup)
    data: DataGroup = Field(default_factory=DataGroup)
    rollout: RolloutGroup = Field(default_factory=RolloutGroup)
    reward: RewardGroup = Field(default_factory=RewardGroup)
    algorithm: AlgorithmGroup = Field(default_factory=AlgorithmGroup)
    critic: CriticGroup = Field(default_factory=CriticGroup)
    prm: PrmGroup = Field(default_factory=PrmGroup)
    train: TrainGroup = Field(default_factory=TrainGroup)
    lora: LoraGroup = Field(default_factory=LoraGroup)
    eval: EvalGroup = Field(default_factory=EvalGroup)
    weights: WeightsGroup = Field(default_factory=WeightsGroup)
    checkpoint: CheckpointGroup = Field(default_factory=CheckpointGroup)
    reject_sampling: RejectSamplingGroup = Field(default_factory=RejectSamplingGroup)
    planning: PlanGroup = Field(default_factory=PlanGroup)
    passthrough: PassThrough = Field(default_factory=PassThrough)

    @classmethod
    def from_flat(
        cls, values: Mapping[str, object], passthrough: PassThrough | None = None, preset: Collection[str] = ()
    ) -> Config:
        """Build a Config from flat field names. ValueError: an unknown field, or a value that a field does not take.

        preset  names of `values` that a preset chose, not the user: `given` leaves them out, and the default of a loss
                for tokens of older weights (`pipeline`).
        """
        unknown = sorted(set(values) - set(GROUP_OF))
        if unknown:
            raise ValueError(f"unknown configuration fields: {', '.join(unknown)}")
        nested: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
        for name, value in values.items():
            nested[GROUP_OF[name]][name] = value
        config = cls(**nested, passthrough=passthrough or PassThrough())
        for name in preset:
            getattr(config, GROUP_OF[name]).model_fields_set.discard(name)
        return with_default(config)

    def value(self, field: str) -> Any:
        """Return the value of a flag by its field's name."""
        return getattr(getattr(self, GROUP_OF[field]), field)

    def changed(self, **values: object) -> Config:
        """Return a copy with these values of flags, or of what is passed through by kind; they count as given."""
        groups: dict[str, dict[str, object]] = {}
        for name, value in values.items():
            groups.setdefault(GROUP_OF.get(name, "passthrough"), {})[name] = value
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=fields) for name, fields in groups.items()}
        )

    def given(self) -> list[str]:
        """The fields that the user set, in the order of the groups."""
        groups = [getattr(self, name) for name in GROUPS]
        return [field for group in groups for field in type(group).model_fields if field in group.model_fields_set]

    def to_file(self) -> dict[str, Any]:
        """Return what config.json has: every flag by its group, and under `given` a --use-tis that the user gave.

        Read back, its value alone would not tell it from the default of --pipeline.
        """
        passed = [name for name in ("use_tis",) if name in self.given()]
        return self.model_dump() | ({"given": passed} if passed else {})

    def to_args(self, **extra: object) -> argparse.Namespace:
        """A fresh flat namespace for hooks: slime's names, a copy that a hook may write on."""
        flat: dict[str, Any] = {}
        for group in GROUPS:
            flat.update(getattr(self, group).model_dump())
        flat.update((name, _number(value)) for name, value in self.passthrough.slime.items() if name not in flat)
        for name, value in self.passthrough.sglang.items():
            flat[f"sglang_{name}"] = copy.deepcopy(value)
        flat.update(copy.deepcopy(self.passthrough.custom))
        flat.update(extra)
        return HookArgs(**flat)


# Name of a group → its class, in the order of help and of the flag reference.
GROUPS: dict[str, type[Group]] = {
    name: info.annotation  # type: ignore[misc]
    for name, info in Config.model_fields.items()
    if name != "passthrough"
}


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
    from fusionrl.config.aliases import value_hint  # reads its tables

    value, kind = item.get("input"), inner_type(FIELDS[field])
    is_choice = typing.get_origin(kind) is typing.Literal
    hint = value_hint(field, str(value), typing.get_args(kind)) if is_choice else ""
    return f"{flag_of(field)} {value}: {item['msg'][:1].lower()}{item['msg'][1:]}{hint}"
