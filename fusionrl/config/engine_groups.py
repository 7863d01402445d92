"""--engine-group: engines of several sizes and flags in one run.

    --engine-group wide:num_gpus=4,per_engine=4,mem-fraction-static=0.8 small:num_gpus=2,per_engine=1

A group is a name, its devices, and SGLang flags that its engines get on top of the run's --sglang-*. All of them serve
the policy's model and get the weights of every push that reaches them; docs/guides/engines.md explains the roles.
"""

import contextlib
import functools
import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fusionrl.base.wording import dividing
from fusionrl.config.config import Config

FLAG = "--engine-group"
GroupRole = Literal["generate", "prefill", "decode", "eval"]
ROLES: tuple[str, ...] = typing.get_args(GroupRole)
_SIZES = ("num_gpus", "per_engine")

# What other parts of a run read from --sglang-* alone: all engines have it alike.
ALIKE = {
    "quantization": "a push brings all engines the same tensors",
    "context_length": "any engine may get the longest sample",
    "allow_auto_truncate": "any engine may get the longest sample",
    "enable_nccl_nvls": "all ranks of a push agree on NCCL's settings",
    "enable_symm_mem": "all ranks of a push agree on NCCL's settings",
    "enable_memory_saver": "engines give their memory back together",
    "enable_return_routed_experts": "every answer has the same fields",
    "mm_enable_dp_encoder": "checksums say which part of a vision tower each rank has",
}


@dataclass(frozen=True)
class EngineGroup:
    """Engines that are alike."""

    name: str
    role: GroupRole
    num_gpus: int
    per_engine: int
    server_args: dict[str, object] = field(default_factory=dict)  # fields of `ServerArgs`

    @property
    def num_engines(self) -> int:
        return self.num_gpus // self.per_engine


def engine_groups(config: Config) -> tuple[EngineGroup, ...]:
    """Return the groups of the run; none without the flag. ValueError: one cannot be read."""
    texts = config.cluster.engine_group
    return read_groups(tuple(texts), config.cluster.rollout_num_gpus_per_engine) if texts else ()


def serving_groups(config: Config) -> tuple[EngineGroup, ...]:
    """Return the groups that answer the policy's requests, in the order of their engines' numbers."""
    return tuple(group for group in engine_groups(config) if group.role != "eval")


def eval_group(config: Config) -> EngineGroup | None:
    """Return the group that only evaluates."""
    return next((group for group in engine_groups(config) if group.role == "eval"), None)


def has_pairs(texts: Sequence[str]) -> bool:
    """Return whether requests go to pairs of engines, of which none answers alone; `texts` are the flag's."""
    return bool(texts) and any(group.role == "prefill" for group in read_groups(tuple(texts), 1))


def devices_of_groups(values: Mapping[str, object]) -> dict[str, int]:
    """Return the counts of devices that follow from the groups, by field, without those that `values` have."""
    texts = values.get("engine_group")
    if not isinstance(texts, list):
        return {}
    groups = read_groups(tuple(map(str, texts)), 1)
    counts = {
        "rollout_num_gpus": sum(group.num_gpus for group in groups if group.role != "eval"),
        "eval_num_gpus": sum(group.num_gpus for group in groups if group.role == "eval"),
    }
    return {name: count for name, count in counts.items() if count and name not in values}


@functools.lru_cache(maxsize=64)
def read_groups(texts: tuple[str, ...], default_size: int) -> tuple[EngineGroup, ...]:
    """Read the values of the flag. `default_size`: devices of an engine whose group does not say."""
    groups = tuple(_read(text, default_size) for text in texts)
    names = [group.name for group in groups]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{FLAG} {twice[0]}: there are two groups of this name; give each its own")
    roles = [group.role for group in groups]
    if roles.count("eval") > 1:
        raise ValueError(f"{FLAG}: two groups have role=eval; one evaluates")
    if ("prefill" in roles) != ("decode" in roles):
        there, missing = ("prefill", "decode") if "prefill" in roles else ("decode", "prefill")
        raise ValueError(f"{FLAG}: a group with role={there} needs one with role={missing}: they answer together")
    if "prefill" in roles and "generate" in roles:
        raise ValueError(
            f"{FLAG}: a router serves pairs (role=prefill) or whole engines (role=generate); give one kind"
        )
    return groups


def _read(text: str, default_size: int) -> EngineGroup:
    flag = f"{FLAG} {text}"
    name, colon, rest = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"{flag}: expected NAME:num_gpus=N,per_engine=N,role={'|'.join(ROLES)},FLAG=VALUE")
    values: dict[str, str] = {}
    for item in _items(rest):
        key, equals, value = item.partition("=")
        key = key.strip().removeprefix("--").removeprefix("sglang-").replace("-", "_")
        if not equals or not key:
            raise ValueError(f"{flag}: {item!r} has no value; write FLAG=VALUE, and FLAG=true for a switch")
        if key in values:
            raise ValueError(f"{flag}: {key} is there twice")
        values[key] = value.strip()
    role = values.pop("role", "generate")
    if role not in ROLES:
        raise ValueError(f"{flag}: role={role}; known are {', '.join(ROLES)}")
    if "num_gpus" not in values:
        raise ValueError(f"{flag}: num_gpus is missing: the devices of the group")
    counts = {"per_engine": default_size}
    for key in _SIZES:
        if key in values:
            counts[key] = _count(flag, key, values.pop(key))
    if counts["num_gpus"] % counts["per_engine"]:
        raise ValueError(
            f"{flag}: num_gpus={counts['num_gpus']} is not a multiple of per_engine={counts['per_engine']};"
            f" {dividing(counts['num_gpus'], counts['per_engine'])}"
        )
    return EngineGroup(name, typing.cast(GroupRole, role), **counts, server_args=_server_args(flag, values))


def _items(text: str) -> list[str]:
    """Divide at commas, but for those within brackets, quotes aside."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item for item in items if item.strip()]


def _count(flag: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{flag}: {key}={value}: expected a number of devices, at least 1")
    return int(value)


def _server_args(flag: str, values: Mapping[str, str]) -> dict[str, object]:
    if not values:
        return {}
    from fusionrl.config import upstream_flags as upstream

    parsed: dict[str, object] = {}
    for key, value in values.items():
        option = key.replace("_", "-")
        if key in ALIKE:
            raise ValueError(f"{flag}: {key} is the same for all engines ({ALIKE[key]}); give --sglang-{option}")
        option, parser = f"--{option}", upstream.sglang_parser()
        try:
            if upstream.is_switch(parser, option):
                if value not in ("true", "false"):
                    raise upstream.UpstreamError("it is a switch; write true or false")
                fields = upstream.parse_with(parser, option, [], upstream.SGLANG_OWNED)
                parsed |= {name: on if value == "true" else False for name, on in fields.items()}
            else:
                listed = [value]
                with contextlib.suppress(ValueError):  # several values are a JSON list
                    listed = list(map(str, json.loads(value))) if value.startswith("[") else listed
                parsed |= upstream.parse_with(parser, option, listed, upstream.SGLANG_OWNED)
        except upstream.UpstreamError as error:
            raise ValueError(f"{flag}: {key}={value}: {error}") from error
    return parsed
