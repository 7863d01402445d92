"""The table of estimators: each name's choices, and every place that acts on them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest

import fusionrl
from fusionrl.algorithms.estimators import ESTIMATORS, Estimator, names_where, readers_of
from fusionrl.algorithms.policy_losses import POLICY_LOSSES
from fusionrl.checks.algorithm import OF_GROUPS, PRICED
from fusionrl.config.config import GROUPS, Config
from fusionrl.config.parser import parse_args
from fusionrl.config.presets import PRESETS
from fusionrl.config.run_parts import estimator_of, policy_loss_name
from fusionrl.cpu import megatron_patches

# What each name came to before there was a table, at commit eb89ee4. By name: the group stage, the one with
# --disable-grpo-std-normalization, the token stage, whitening, the model besides the policy, the policy loss.
CHOICES = {
    "grpo": ("grpo", "dr_grpo", "spread", False, None, "ppo"),
    "dr_grpo": ("dr_grpo", "dr_grpo", "spread", False, None, "ppo"),
    "gspo": ("grpo", "dr_grpo", "spread", False, None, "gspo"),
    "cispo": ("grpo", "dr_grpo", "spread", False, None, "cispo"),
    "rloo": ("rloo", "rloo", "spread", False, None, "ppo"),
    "reinforce_plus_plus": (None, None, "discounted", True, None, "ppo"),
    "reinforce_plus_plus_baseline": (
        *("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
        *("spread", True, None, "ppo"),
    ),
    "remax": ("remax", "remax", "spread", False, None, "ppo"),
    "opo": ("opo", "opo", "spread", False, None, "ppo"),
    "pass_at_k": ("pass_at_k_advantages", "pass_at_k_advantages", "spread", False, None, "ppo"),
    "ppo": (None, None, "critic", False, "critic", "ppo"),
    "prime": ("rloo", "rloo", "process", True, "prm", "ppo"),
}
ACCURACY = "fusionrl.rollout.filters.check_accuracy_in_range"
NONZERO_STD = "fusionrl.rollout.filters.check_reward_nonzero_std"
FLAGS = {
    "grpo": {
        "advantage_estimator": "grpo",
        "calculate_per_token_loss": False,
        "use_kl_loss": True,
        "kl_loss_coef": 0.04,
        "kl_loss_type": "k3",
    },
    "dr_grpo": {"advantage_estimator": "dr_grpo", "loss_aggregation": "constant"},
    "dapo": {
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "calculate_per_token_loss": True,
        "dynamic_sampling_filter_path": NONZERO_STD,
    },
    "gspo": {
        "advantage_estimator": "gspo",
        "eps_clip": 3e-4,
        "eps_clip_high": 4e-4,
        "calculate_per_token_loss": False,
    },
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    "rloo": {"advantage_estimator": "rloo", "loss_aggregation": "constant"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.01},
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "use_kl_loss": True,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "k2",
    },
    "remax": {"advantage_estimator": "remax", "policy_loss": "gpg", "loss_aggregation": "constant"},
    "ppo": {"advantage_estimator": "ppo", "normalize_advantages": True, "kl_coef": 0.001},
    "prime": {
        "advantage_estimator": "prime",
        "prm_beta": 0.05,
        "calculate_per_token_loss": True,
        "dynamic_sampling_filter_path": ACCURACY,
    },
    "dpo": {"policy_loss": "dpo", "dpo_beta": 0.1},
}
# Of each --algorithm: estimator, policy loss, whitening, and the model besides the policy in a whole run.
RUNS = {
    "grpo": ("grpo", "ppo", False, None),
    "dr_grpo": ("dr_grpo", "ppo", False, None),
    "dapo": ("grpo", "ppo", False, None),
    "gspo": ("gspo", "gspo", False, None),
    "cispo": ("cispo", "cispo", False, None),
    "rloo": ("rloo", "ppo", False, None),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo", True, None),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo", True, None),
    "remax": ("remax", "gpg", False, None),
    "ppo": ("ppo", "ppo", True, "critic"),
    "prime": ("prime", "ppo", True, "prm"),
    "dpo": ("grpo", "dpo", False, None),
}


def test_each_name_chooses_what_it_chose_before() -> None:
    for name in CHOICES:
        estimator = ESTIMATORS[name]
        stages = (estimator.group_stage(), estimator.group_stage(is_plain=True), estimator.tokens)
        found = tuple(None if stage is None else stage.__name__ for stage in stages)
        assert (*found, estimator.is_whitened, estimator.role, estimator.policy_loss) == CHOICES[name], name


def test_each_algorithm_sets_the_flags_that_it_set_before() -> None:
    assert {name: PRESETS[name] for name in FLAGS} == FLAGS


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_each_algorithm_is_the_one_of_before(name: str) -> None:
    config = parse_args(["--algorithm", name, "--n-samples-per-prompt", "4", "--rollout-max-response-len", "100"])
    megatron_patches.install()
    from fusionrl.trainer.advantages import AdvantageOptions
    from fusionrl.trainer.loss import LossOptions

    options, loss = AdvantageOptions.from_config(config), LossOptions.from_config(config)
    role = estimator_of(config.algorithm).role
    assert (config.algorithm.advantage_estimator, loss.policy_loss, options.is_whitened, role) == RUNS[name]
    assert options.stage.__name__ == CHOICES[RUNS[name][0]][2]


def test_the_groups_of_names_are_those_of_before() -> None:
    of_groups = {"grpo", "gspo", "cispo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_plus_plus_baseline"}
    assert _known(OF_GROUPS) == of_groups
    assert readers_of("kl_coef") == PRICED
    assert _known(PRICED) == _known(readers_of("kl_coef_type")) == {"reinforce_plus_plus", "ppo"}
    assert _known(readers_of("gamma")) == {"reinforce_plus_plus", "ppo", "prime"}
    assert _known(readers_of("lambd")) == _known(readers_of("bootstrap_truncated")) == {"ppo"}
    assert _known(readers_of("pass_k")) == {"pass_at_k"}
    assert _known(names_where(lambda estimator: estimator.needs_greedy_answer)) == {"remax"}
    assert _known(names_where(lambda estimator: estimator.plain_group is not None)) == {"grpo", "gspo", "cispo"}


def _known(names: Iterable[str]) -> set[str]:
    """Of these estimators the ones that were there before the table."""
    return set(names) & set(CHOICES)


def test_an_entry_names_only_what_there_is() -> None:
    flags = {name: group for group, model in GROUPS.items() for name in model.model_fields}
    for name, estimator in ESTIMATORS.items():
        assert estimator.policy_loss in POLICY_LOSSES, name
        assert {*estimator.reads, *(estimator.preset or ())} <= set(flags), name
        for algorithm in ({"advantage_estimator": name}, {"advantage_estimator": name, "policy_loss": "sapo"}):
            assert policy_loss_name(Config.from_flat(algorithm).algorithm) in (estimator.policy_loss, "sapo")


def test_an_entry_has_no_field_that_nobody_sets() -> None:
    for field in fields(Estimator):
        values = [getattr(estimator, field.name) for estimator in ESTIMATORS.values()]
        assert any(value != field.default for value in values), field.name


def test_the_table_is_read_without_torch() -> None:
    """The command line and the Buffer read it; torch would take seconds of each start."""
    code = "import sys, fusionrl.algorithms.estimators; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_code_compares_the_name_of_an_estimator() -> None:
    """What follows from a name is a field of its entry."""
    package = Path(fusionrl.__file__).parent
    compared = re.compile(r"advantage_estimator (?:==|!=|(?:not )?in \()")
    found = [path for path in sorted(package.rglob("*.py")) if compared.search(path.read_text(encoding="utf-8"))]
    assert found == []
