"""The tables of estimators and policy losses: what each name chooses, and that they name only what there is."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import fusionrl
from fusionrl.algorithms.estimators import ESTIMATORS, LOSSES, Estimator
from fusionrl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossOptions
from fusionrl.config.algorithm import AlgorithmGroup
from fusionrl.config.config import GROUPS, Config
from fusionrl.config.run_parts import policy_loss_name

# Of each estimator: its group stage, the one with --disable-grpo-std-normalization, its token stage, the policy loss of
# `auto`, whether it always whitens, and the model besides the policy.
ENTRIES = {
    "grpo": ("grpo", "dr_grpo", "spread", "ppo", False, None),
    "dr_grpo": ("dr_grpo", "dr_grpo", "spread", "ppo", False, None),
    "gspo": ("grpo", "dr_grpo", "spread", "gspo", False, None),
    "cispo": ("grpo", "dr_grpo", "spread", "cispo", False, None),
    "rloo": ("rloo", "rloo", "spread", "ppo", False, None),
    "reinforce_plus_plus": (None, None, "discounted", "ppo", True, None),
    "reinforce_plus_plus_baseline": ("dr_grpo", "dr_grpo", "spread", "ppo", True, None),
    "remax": ("remax", "remax", "spread", "ppo", False, None),
    "opo": ("opo", "opo", "spread", "ppo", False, None),
    "pass_at_k": ("pass_at_k_advantages", "pass_at_k_advantages", "spread", "ppo", False, None),
    "ppo": (None, None, "critic", "ppo", False, "critic"),
    "prime": ("rloo", "rloo", "process", "ppo", True, "prm"),
}


def test_what_each_estimator_decides() -> None:
    found = {}
    for name, e in ESTIMATORS.items():
        stages = (e.group_stage(), e.group_stage(is_plain=True), e.tokens)
        names = (None if stage is None else stage.__name__ for stage in stages)
        found[name] = (*names, e.policy_loss, e.is_whitened, e.role)
    assert {name: found.get(name) for name in ENTRIES} == ENTRIES


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
    code = "import sys, fusionrl.algorithms.estimators; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_code_compares_the_name_of_an_estimator() -> None:
    """What follows from a name is a field of its entry."""
    package = Path(fusionrl.__file__).parent
    compared = re.compile(r"advantage_estimator (?:==|!=|(?:not )?in \()")
    found = [path for path in sorted(package.rglob("*.py")) if compared.search(path.read_text(encoding="utf-8"))]
    assert found == []
