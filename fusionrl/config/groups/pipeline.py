"""Flags of a pipeline (PipelineGroup): each sets one knob of the controller, over the preset that --pipeline names."""

from __future__ import annotations

from typing import Literal

from fusionrl.config import scopes
from fusionrl.config.groups.base import Group, acting, of_engines

of_stream = acting(scopes.RL, scopes.STREAMED)


class PipelineGroup(Group):
    """Pipeline: how far generation may run ahead of training"""

    max_staleness: int | None = of_stream(
        None, "Maximum weight versions between sampling a token and training on it. Default: set by --pipeline.", ge=0
    )
    admission_lead: float | None = of_stream(
        None, "How many batches ahead of need prompts are admitted, 0 to --max-staleness. Default: by --pipeline.", ge=0
    )
    update_weights_interval: int | None = of_stream(
        None, "Rollouts trained between two weight pushes. Default: set by --pipeline.", ge=1
    )
    in_flight: Literal["drain", "retract", "in_place"] | None = of_stream(
        None,
        "Unfinished samples at a weight push: the push waits for them (drain), or they continue with the"
        " new weights, their KV cache recomputed (retract) or kept (in_place). Default: set by --pipeline.",
    )
    at_deadline: Literal["wait", "drop"] | None = of_stream(
        None, "At a version's last batch, wait for groups that would be too old later, or drop them. Default: wait."
    )
    max_samples_in_flight: int | None = of_stream(
        None, "Maximum samples in flight over all engines. Default: --sglang-server-concurrency for each engine.", ge=1
    )
    sample_timeout: float | None = of_engines(
        None,
        "Time limit of a sample, seconds, from its first request to its last token, tools included; a sample over it"
        " fails and is not trained on. A function that blocks its thread cannot be stopped. Default: none.",
        gt=0,
    )
    failed_samples: Literal["leave-out", "replace"] = of_stream(
        "leave-out", "Train a group without its failed samples, or replace the whole group (always if all failed)."
    )
    max_group_tries: int = of_stream(
        2, "Tries of a failed group, each from its prompt, before another group replaces it.", ge=1
    )
    max_failed_groups: int = of_stream(32, "End the run after this many failed groups in a row.", ge=1)
