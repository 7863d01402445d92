"""The tables of estimators and policy losses: what each name chooses, and that they name only what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import fusionrl
from fusionrl.algorithms.estimators import ESTIMATORS, Estimator
from fusionrl.algorithms.losses import LOSSES
from fusionrl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossOptions
from fusionrl.config.config import GROUPS, Config
from fusionrl.config.groups.algorithm import AlgorithmGroup
from fusionrl.config.parser import parse_args
from fusionrl.config.run_parts import estimator_of, policy_loss_name
from fusionrl.cpu import megatron_patches

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


# Of each estimator: its group stage, the one with --disable-grpo-std-normalization, and its token stage.
STAGES = {
    "grpo": ("grpo", "dr_grpo", "spread"),
    "dr_grpo": ("dr_grpo", "dr_grpo", "spread"),
    "gspo": ("grpo", "dr_grpo", "spread"),
    "cispo": ("grpo", "dr_grpo", "spread"),
    "rloo": ("rloo", "rloo", "spread"),
    "reinforce_plus_plus": (None, None, "discounted"),
    "reinforce_plus_plus_baseline": ("dr_grpo", "dr_grpo", "spread"),
    "remax": ("remax", "remax", "spread"),
    "opo": ("opo", "opo", "spread"),
    "pass_at_k": ("pass_at_k_advantages", "pass_at_k_advantages", "spread"),
    "ppo": (None, None, "critic"),
    "prime": ("rloo", "rloo", "process"),
}


def test_the_stages_of_each_estimator() -> None:
    found = {}
    for name, estimator in ESTIMATORS.items():
        stages = (estimator.group_stage(), estimator.group_stage(is_plain=True), estimator.tokens)
        found[name] = tuple(None if stage is None else stage.__name__ for stage in stages)
    assert {name: found.get(name) for name in STAGES} == STAGES


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_each_algorithm(name: str) -> None:
    config = parse_args(["--algorithm", name, "--n-samples-per-prompt", "4", "--rollout-max-response-len", "100"])
    megatron_patches.install()
    from fusionrl.trainer.advantages import is_whitened
    from fusionrl.trainer.loss import LossOptions

    algorithm, loss = config.algorithm, LossOptions.from_config(config)
    facts = (algorithm.advantage_estimator, loss.policy_loss, is_whitened(algorithm), estimator_of(algorithm).role)
    assert facts == RUNS[name]


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


def test_losses_have_functions_and_their_constants_are_flags() -> None:
    """`eps_low`, `eps_high` and `dual_clip` are --eps-clip, --eps-clip-high and --eps-clip-c."""
    assert set(POLICY_LOSSES) == set(LOSSES) - {"dpo"}
    flags = {field for loss in LOSSES.values() for field in loss.reads}
    assert flags <= set(AlgorithmGroup.model_fields)
    assert set(PolicyLossOptions.__dataclass_fields__) - {"eps_low", "eps_high", "dual_clip"} <= flags


def test_the_tables_are_read_without_torch() -> None:
    """The command line and the Buffer read them; torch would take seconds of each start."""
    code = "import sys, fusionrl.algorithms.estimators, fusionrl.algorithms.losses; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_code_compares_the_name_of_an_estimator() -> None:
    """What follows from a name is a field of its entry."""
    package = Path(fusionrl.__file__).parent
    compared = re.compile(r"advantage_estimator (?:==|!=|(?:not )?in \()")
    found = [path for path in sorted(package.rglob("*.py")) if compared.search(path.read_text(encoding="utf-8"))]
    assert found == []
