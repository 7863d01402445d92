"""The table of policy losses (--policy-loss). To add one: a file with its function, and an entry here.

The command line reads this table, so nothing here imports torch: an entry names its function, and `policy_losses.py`
loads all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

_RANGE = ("eps_clip", "eps_clip_high")


@dataclass(frozen=True)
class Loss:
    """One policy loss.

    function         module and name of the function in this room, a `policy_loss.PolicyLoss`; None: learns from pairs
    reads            fields of flags that only some losses read
    clips_sequences  its ratio is one of whole sequences, so it is sequences that it clips
    selects          it chooses tokens by statistics of the whole mini-batch (`covariance.SELECTORS`)
    is_flag          --policy-loss takes it
    """

    function: str | None
    reads: tuple[str, ...] = ()
    clips_sequences: bool = False
    selects: bool = False
    is_flag: bool = True


LOSSES: dict[str, Loss] = {
    "ppo": Loss("policy_loss.ppo", reads=(*_RANGE, "eps_clip_c")),
    "gspo": Loss("gspo.gspo", reads=(*_RANGE, "eps_clip_c"), clips_sequences=True),
    "gspo_token": Loss("gspo.gspo_token", reads=(*_RANGE, "eps_clip_c"), clips_sequences=True),
    "cispo": Loss("cispo.cispo", reads=_RANGE),
    "sapo": Loss("sapo.sapo", reads=("sapo_tau_pos", "sapo_tau_neg")),
    "gpg": Loss("policy_gradient.policy_gradient"),
    "gmpo": Loss("gmpo.gmpo", reads=_RANGE),
    "clip_cov": Loss(
        "covariance.clip_cov",
        reads=(*_RANGE, "eps_clip_c", "clip_cov_fraction", "clip_cov_low", "clip_cov_high"),
        selects=True,
    ),
    "kl_cov": Loss("covariance.kl_cov", reads=("kl_cov_fraction", "kl_cov_coef"), selects=True),
    "dpo": Loss(None, reads=("dpo_beta", "dpo_label_smoothing")),
    "policy_gradient": Loss("policy_gradient.policy_gradient", is_flag=False),
    "sft": Loss("sft.cross_entropy", is_flag=False),
}


def losses_that_read(field: str) -> tuple[str, ...]:
    """Return the names of the policy losses that read a flag."""
    return tuple(name for name, loss in LOSSES.items() if field in loss.reads)
