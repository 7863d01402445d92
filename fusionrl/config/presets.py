"""`--algorithm NAME`: the flags of a published algorithm; a flag that the user also passes overrides the preset."""

from collections.abc import Mapping
from typing import Any

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.config.switches import spell

NONZERO_STD = "fusionrl.rollout.filters.check_reward_nonzero_std"

# Algorithms without an estimator: flags over another estimator, or over the default one.
_COMPOSED: dict[str, dict[str, Any]] = {
    "dapo": {
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "calculate_per_token_loss": True,
        "dynamic_sampling_filter_path": NONZERO_STD,
    },
    "dpo": {"policy_loss": "dpo", "dpo_beta": 0.1},
}
PRESETS: dict[str, dict[str, Any]] = {
    name: {"advantage_estimator": name, **estimator.preset}
    for name, estimator in ESTIMATORS.items()
    if estimator.preset is not None
} | _COMPOSED
OVERLONG_SHARE = 0.2  # DAPO's buffer: 4,096 of 20,480 tokens


def with_preset(values: dict[str, object]) -> dict[str, object]:
    """Return `values` (flags that were given) completed by the preset that they name, if they name one."""
    name = values.get("algorithm")
    preset = dict(PRESETS.get(str(name), {}))
    longest = str(values.get("rollout_max_response_len", ""))
    if name == "dapo" and longest.isdecimal():
        preset["overlong_buffer_len"] = max(1, round(OVERLONG_SHARE * int(longest)))
    if str(values.get("use_kl_loss", True)) in ("False", "false"):
        preset.pop("kl_loss_coef", None)  # the KL term is switched off, and its coefficient with it
    return preset | values


def described(values: Mapping[str, object]) -> list[str]:
    """The flags of the preset that `values` (all flags) name, as they stand; those that were given otherwise say so."""
    chosen = {name: values[name] for name in ("algorithm", "rollout_max_response_len")}
    return [
        spell(field, values[field]) + ("" if values[field] == value else f" (given; the preset has {value})")
        for field, value in with_preset(chosen).items()
        if field not in chosen
    ]
