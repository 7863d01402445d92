"""Flags of a pipeline (PipelineGroup): each sets one knob of the controller, over the preset that --pipeline names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fusionrl.config.groups.base import Group


class PipelineGroup(Group):
    """Pipeline: how far generation may run ahead of training"""

    max_staleness: int | None = Field(
        None,
        description="Versions of the weights between the one that sampled a token and the one that it trains, at most."
        " Default: of --pipeline.",
        ge=0,
    )
    admission_lead: float | None = Field(
        None,
        description="How far ahead of need prompts are admitted, in batches of a version: 0 to --max-staleness."
        " Default: of --pipeline.",
        ge=0,
    )
    update_weights_interval: int | None = Field(
        None, description="Rollouts that are trained between two weight pushes. Default: of --pipeline.", ge=1
    )
    in_flight: Literal["drain", "retract", "in_place"] | None = Field(
        None,
        description="Samples that are being generated at a weight push: the push waits for them (drain), or they go on"
        " under the new weights, with their KV cache computed again (retract) or kept (in_place). Default: of"
        " --pipeline.",
    )
    at_deadline: Literal["wait", "drop"] | None = Field(
        None,
        description="At a version's last batch, groups that would be too old later are waited for, or dropped, which"
        " trains fewer long answers. Default: wait.",
    )
    max_samples_in_flight: int | None = Field(
        None,
        description="Samples under way over all engines. Default: --sglang-server-concurrency for each engine.",
        ge=1,
    )
    sample_timeout: float | None = Field(
        None,
        description="Time limit of a sample, in seconds, from its first request to its last token, tools included. Then"
        " it has failed and is not trained on. A function that blocks its thread cannot be ended. Default: none.",
        gt=0,
    )
    failed_samples: Literal["leave-out", "replace"] = Field(
        "leave-out",
        description="A group with failed samples is trained without them, or replaced as a whole by another group."
        " A group without any other sample is replaced in both cases.",
    )
    max_group_tries: int = Field(
        2, description="A group that failed is tried again from its prompt, before another takes its place.", ge=1
    )
    max_failed_groups: int = Field(32, description="So many failed groups one after the other end the run.", ge=1)
