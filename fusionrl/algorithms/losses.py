"""The table of policy losses (--policy-loss), which the command line reads: nothing here imports torch.

`policy_losses.py` has their functions.
"""

from dataclasses import dataclass

_RANGE = ("eps_clip", "eps_clip_high")


@dataclass(frozen=True)
class Loss:
    """One policy loss.

    reads            fields of flags that only some losses read
    clips_sequences  its ratio is one of whole sequences, so it is sequences that it clips
    selects          it chooses tokens by statistics of the whole mini-batch (`covariance.select`)
    """

    reads: tuple[str, ...] = ()
    clips_sequences: bool = False
    selects: bool = False


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


def losses_that_read(field: str) -> tuple[str, ...]:
    """Return the names of the policy losses that read a flag."""
    return tuple(name for name, loss in LOSSES.items() if field in loss.reads)
