"""The controller's settings, and the pipelines, which are presets of them."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal


def _knob(
    default: object = MISSING,
    *,
    least: int | None = None,
    flag: str | None = None,
    help: str = "",
    given: object = None,
) -> Any:
    """Declare a knob: its least value, and the field of the flag that sets it, with its help and default.

    `PipelineGroup` has these flags; one whose default is None leaves the knob to the pipeline.
    """
    return field(default=default, metadata={"least": least, "flag": flag, "help": help, "given": given})


@dataclass(frozen=True)
class Knobs:
    """One pipeline.

    A fetch is one rollout's batch of groups for the trainers. Weights are pushed after every `fetches_per_push`
    fetches, so the weights of version v train fetches v * fetches_per_push up to (v + 1) * fetches_per_push - 1.

    groups_per_fetch   F; fetches_per_push is U, max_staleness K, and lead L with 0 ≤ L ≤ K, in versions
    num_fetches        of the whole run; None: until the data end
    spare_groups       admitted beyond what a version trains (over-sampling); the last ones are dropped
    samples_per_group  samples of one prompt
    exclusive          engines and trainers share devices and alternate
    """

    groups_per_fetch: int = _knob(least=1)
    max_staleness: int = _knob(
        0,
        least=0,
        flag="max_staleness",
        help="Maximum weight versions between sampling a token and training on it. Default: set by --pipeline.",
    )
    lead: float = _knob(
        0.0,
        least=0,
        flag="admission_lead",
        help="How many batches ahead of need prompts are admitted, 0 to --max-staleness. Default: by --pipeline.",
    )
    fetches_per_push: int = _knob(
        1,
        least=1,
        flag="update_weights_interval",
        help="Rollouts trained between two weight pushes. Default: set by --pipeline.",
    )
    in_flight: Literal["drain", "retract", "in_place"] = _knob(
        "drain",
        flag="in_flight",
        help="Unfinished samples at a weight push: the push waits for them (drain), or they continue with the"
        " new weights, their KV cache recomputed (retract) or kept (in_place). Default: set by --pipeline.",
    )
    at_deadline: Literal["wait", "drop"] = _knob(  # to drop them trains fewer long answers
        "wait",
        flag="at_deadline",
        help="At a version's last batch, wait for groups that would be too old later, or drop them. Default: wait.",
    )
    max_samples_in_flight: int = _knob(  # one group is admitted in any case
        1 << 30,
        least=1,
        flag="max_samples_in_flight",
        help="Maximum samples in flight over all engines. Default: --sglang-server-concurrency for each engine.",
    )
    max_tries: int = _knob(
        1,
        least=1,
        flag="max_group_tries",
        help="Tries of a failed group, each from its prompt, before another group replaces it.",
        given=2,
    )
    max_failures_in_row: int = _knob(  # since a group became ready
        1 << 30,
        least=1,
        flag="max_failed_groups",
        help="End the run after this many failed groups in a row.",
        given=32,
    )
    num_fetches: int | None = _knob(None, least=1)
    spare_groups: int = _knob(0, least=0)
    samples_per_group: int = _knob(1, least=1)
    exclusive: bool = _knob(False)

    def __post_init__(self) -> None:
        """Raise ValueError for settings that contradict each other: the setting, its value and the cure."""
        for knob in fields(self):
            value, least = getattr(self, knob.name), knob.metadata["least"]
            if least is not None and value is not None and value < least:
                raise ValueError(f"{shown(knob.name)} is {value}; give at least {least}")
        staleness, lead, in_flight = map(shown, ("max_staleness", "lead", "in_flight"))
        if not 0 <= self.lead <= self.max_staleness:
            raise ValueError(f"{lead} is {self.lead:g}; give 0 to {staleness} ({self.max_staleness})")
        if self.spare_groups and self.max_staleness:
            # They are dropped at the end of their version, and groups of such a pipeline may be trained later.
            raise ValueError(
                f"spare_groups is {self.spare_groups} with {staleness} {self.max_staleness}; give {lead} instead"
            )
        if self.exclusive and (self.max_staleness or self.in_flight != "drain"):
            raise ValueError(
                f"engines and trainers share devices, so nothing runs ahead: give {staleness} 0 and {in_flight} drain"
            )
        if self.in_flight != "drain" and not self.max_staleness:
            # The first tokens of samples that continue under new weights are a version old.
            raise ValueError(f"{in_flight} is {self.in_flight}; give {staleness} of at least 1")

    @property
    def groups_per_version(self) -> int:
        """B: groups that one version of the weights trains."""
        return self.groups_per_fetch * self.fetches_per_push


# Knob → the field of its flag.
FLAGS: dict[str, str] = {knob.name: flag for knob in fields(Knobs) if (flag := knob.metadata["flag"])}


def shown(name: str) -> str:
    """Return a knob as messages call it: by its flag, where it has one."""
    return f"--{FLAGS[name].replace('_', '-')}" if name in FLAGS else name


IN_TURN = "on-policy"  # one rollout after the other, without the controller
# Name → knobs that the pipeline sets; flags override them. The leads of async and async-partial were measured with
# `python -m tools.bench.pipelines paced --virtual`: a smaller lead leaves trainers waiting, a larger one makes tokens
# older and no step shorter. If pushes drain, groups admitted beyond one batch only wait.
PIPELINES: dict[str, dict[str, int | float | str]] = {
    "on-policy": {"max_staleness": 0, "lead": 0.0, "fetches_per_push": 1, "in_flight": "drain"},
    "stream": {"max_staleness": 0, "lead": 0.0, "fetches_per_push": 4, "in_flight": "drain"},
    "one-step-off": {"max_staleness": 1, "lead": 1.0, "fetches_per_push": 1, "in_flight": "drain"},
    "async": {"max_staleness": 2, "lead": 1.0, "fetches_per_push": 1, "in_flight": "drain"},
    "async-partial": {"max_staleness": 2, "lead": 1.5, "fetches_per_push": 1, "in_flight": "retract"},
}
