"""Samples without the log-probs that the loss of a pipeline would correct them by."""

from __future__ import annotations

from collections.abc import Sequence

from fusionrl.config.config import Config
from fusionrl.config.off_policy import corrects_by_default
from fusionrl.data.sample import Sample, is_trained_on
from fusionrl.rollout.weight_versions import warn_once


def warn_without_log_probs(samples: Sequence[Sample], config: Config) -> None:
    """Warn once where nobody gave --use-tis, it is on by default, and a function sets no rollout_log_probs.

    Such rollouts are trained uncorrected. Where the flag was given, they are an error of the loss.
    """
    if not corrects_by_default(config):
        return
    lacking = next((s for s in samples if is_trained_on(s) and s.rollout_log_probs is None), None)
    if lacking is not None:
        warn_once(
            "rollout_log_probs of --use-tis",
            f"sample {lacking.index} has no rollout_log_probs, so --use-tis, the default of --pipeline"
            f" {config.run.pipeline}, does nothing in such rollouts: tokens of older weights are taken for tokens of"
            " the newest. Let your function set them (docs/guides/multi-turn.md), or give --no-use-tis",
        )
