"""The table of policy losses: every entry has its function, and names only flags that there are."""

from __future__ import annotations

import subprocess
import sys
import typing

from fusionrl.algorithms.covariance import SELECTORS
from fusionrl.algorithms.losses import LOSSES, losses_that_read
from fusionrl.algorithms.policy_loss import PolicyLossOptions
from fusionrl.algorithms.policy_losses import POLICY_LOSSES
from fusionrl.config.fields import inner_type
from fusionrl.config.groups.algorithm import AlgorithmGroup


def test_every_entry_has_its_function() -> None:
    assert set(POLICY_LOSSES) == set(LOSSES) - {"dpo"}
    for name, loss in LOSSES.items():
        if loss.function is not None:
            assert POLICY_LOSSES[name].__name__ == loss.function.split(".")[1]
    assert {name for name, loss in LOSSES.items() if loss.selects} == set(SELECTORS)


def test_the_flag_takes_what_it_took_before_there_was_a_table() -> None:
    choices = typing.get_args(inner_type(AlgorithmGroup.model_fields["policy_loss"]))
    before = ("auto", "ppo", "gspo", "gspo_token", "cispo", "sapo", "gpg", "gmpo", "clip_cov", "kl_cov", "dpo")
    assert choices[: len(before)] == before


def test_every_constant_of_the_losses_is_a_flag_that_some_loss_reads() -> None:
    """`eps_low`, `eps_high` and `dual_clip` are --eps-clip, --eps-clip-high and --eps-clip-c."""
    flags = {field for loss in LOSSES.values() for field in loss.reads}
    assert flags <= set(AlgorithmGroup.model_fields)
    constants = set(PolicyLossOptions.__dataclass_fields__) - {"eps_low", "eps_high", "dual_clip"}
    assert constants <= flags
    assert losses_that_read("eps_clip") == ("ppo", "gspo", "gspo_token", "cispo", "gmpo", "clip_cov")
    assert losses_that_read("eps_clip_c") == ("ppo", "gspo", "gspo_token", "clip_cov")


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, fusionrl.algorithms.losses; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
