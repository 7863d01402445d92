"""The tables of advantage estimators (--advantage-estimator) and of policy losses (--policy-loss).

To add an estimator: a function of its stage, and an entry here; docs/internals/extend.md has a complete example. To add
a loss: its function in `policy_losses.py`, and an entry here. Everything that a name decides is a field of its entry;
no other code compares the name. Nothing here needs torch: the command line and the Buffer read the tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fusionrl.algorithms.stages import (
    SampleBatch,
    TokenStage,
    critic,
    discounted,
    dr_grpo,
    grpo,
    opo,
    pass_at_k_advantages,
    process,
    remax,
    rloo,
    spread,
)

GroupStage = Callable[[SampleBatch], np.ndarray]  # n samples -> [n] float64
Role = Literal["critic", "prm"]  # also the prefix of their flags and metrics, and their folder in a checkpoint
FlagValue = bool | int | float | str

_PRICED = ("gamma", "kl_coef", "kl_coef_type")
ACCURACY = "fusionrl.rollout.filters.check_accuracy_in_range"
NONZERO_STD = "fusionrl.rollout.filters.check_reward_nonzero_std"


@dataclass(frozen=True)
class Estimator:
    """One advantage estimator.

    group        group stage, in the Buffer, where all groups are known: a value for each sample. None: the rewards
                 reach the trainers as they are
    plain_group  group stage with --disable-grpo-std-normalization; None: the flag has no effect
    tokens       token stage, in the trainers: from values of samples to advantages of tokens
    compares_siblings    the group stage measures a sample against the others of its prompt; alone it is worth 0
    needs_greedy_answer  the group stage needs the reward of a greedy answer to each prompt (`SampleBatch.baselines`)
    is_whitened  advantages are always whitened over the rollout; otherwise --normalize-advantages decides
    role         the model that is trained in addition to the policy
    reads        fields of flags that only some estimators read
    policy_loss  the loss of --policy-loss auto
    preset       fields and values that `--algorithm NAME` adds to the estimator; None: no --algorithm of this name
    """

    group: GroupStage | None = None
    plain_group: GroupStage | None = None
    tokens: TokenStage = spread
    compares_siblings: bool = False
    needs_greedy_answer: bool = False
    is_whitened: bool = False
    role: Role | None = None
    reads: tuple[str, ...] = ()
    policy_loss: str = "ppo"
    preset: Mapping[str, FlagValue] | None = None

    def group_stage(self, is_plain: bool = False) -> GroupStage | None:
        """Return the group stage; `is_plain`: without the group's deviation, where there is a choice."""
        return self.plain_group if is_plain and self.plain_group is not None else self.group


# Figures of the presets are the papers' where they give any; docs/guides/algorithms.md has the sources.
ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(
        grpo,
        plain_group=dr_grpo,
        compares_siblings=True,
        preset={"calculate_per_token_loss": False, "use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "k3"},
    ),
    "dr_grpo": Estimator(dr_grpo, compares_siblings=True, preset={"loss_aggregation": "constant"}),
    "gspo": Estimator(
        grpo,
        plain_group=dr_grpo,
        compares_siblings=True,
        policy_loss="gspo",
        preset={"eps_clip": 3e-4, "eps_clip_high": 4e-4, "calculate_per_token_loss": False},
    ),
    "cispo": Estimator(
        grpo,
        plain_group=dr_grpo,
        compares_siblings=True,
        policy_loss="cispo",
        preset={"eps_clip": 1.0, "eps_clip_high": 4.0},
    ),
    "rloo": Estimator(rloo, compares_siblings=True, preset={"loss_aggregation": "constant"}),
    "reinforce_plus_plus": Estimator(tokens=discounted, is_whitened=True, reads=_PRICED, preset={"kl_coef": 0.01}),
    "reinforce_plus_plus_baseline": Estimator(
        dr_grpo,
        compares_siblings=True,
        is_whitened=True,
        preset={"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "k2"},
    ),
    "remax": Estimator(remax, needs_greedy_answer=True, preset={"policy_loss": "gpg", "loss_aggregation": "constant"}),
    "opo": Estimator(opo, compares_siblings=True),
    "pass_at_k": Estimator(pass_at_k_advantages, compares_siblings=True, reads=("pass_k",)),
    "ppo": Estimator(
        tokens=critic,
        role="critic",
        reads=(*_PRICED, "lambd", "bootstrap_truncated"),
        preset={"normalize_advantages": True, "kl_coef": 0.001},
    ),
    "prime": Estimator(
        rloo,
        tokens=process,
        compares_siblings=True,
        is_whitened=True,
        role="prm",
        reads=("gamma",),
        preset={"prm_beta": 0.05, "calculate_per_token_loss": True, "dynamic_sampling_filter_path": ACCURACY},
    ),
}


# Algorithms without an estimator of their own: flags over another one, or over the default.
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


def names_where(holds: Callable[[Estimator], bool]) -> tuple[str, ...]:
    """Return the names of the estimators that a rule holds for, in the table's order."""
    return tuple(name for name, estimator in ESTIMATORS.items() if holds(estimator))


_RANGE = ("eps_clip", "eps_clip_high")


@dataclass(frozen=True)
class Loss:
    """One policy loss."""

    reads: tuple[str, ...] = ()  # fields of flags that only some losses read
    clips_sequences: bool = False  # its ratio is one of whole sequences, so it is sequences that it clips
    selects: bool = False  # it chooses tokens by statistics of the whole mini-batch (`covariance.select`)


LOSSES: dict[str, Loss] = {
    "ppo": Loss((*_RANGE, "eps_clip_c")),
    "gspo": Loss((*_RANGE, "eps_clip_c"), clips_sequences=True),
    "gspo_token": Loss((*_RANGE, "eps_clip_c"), clips_sequences=True),
    "cispo": Loss(_RANGE),
    "sapo": Loss(("sapo_tau_pos", "sapo_tau_neg")),
    "gpg": Loss(),
    "gmpo": Loss(_RANGE),
    "clip_cov": Loss((*_RANGE, "eps_clip_c", "clip_cov_fraction", "clip_cov_low", "clip_cov_high"), selects=True),
    "kl_cov": Loss(("kl_cov_fraction", "kl_cov_coef"), selects=True),
    "dpo": Loss(("dpo_beta", "dpo_label_smoothing")),  # of pairs: `dpo.py`
}


def readers_of(field: str, table: Mapping[str, Estimator] | Mapping[str, Loss] = ESTIMATORS) -> tuple[str, ...]:
    """Return the names of a table, of estimators or losses, whose entries read a flag."""
    return tuple(name for name, entry in table.items() if field in entry.reads)
