"""The controller's settings, and the pipelines, which are presets of them."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal


def _knob(default: object = MISSING, *, least: int | None = None, flag: str | None = None) -> Any:
    """Declare a knob: its least value, and the field of the flag that sets it, where there is one."""
    return field(default=default, metadata={"least": least, "flag": flag})


@dataclass(frozen=True)
class Knobs:
    """One pipeline.

    A fetch is one rollout's batch of groups for the trainers. Weights are pushed after every `fetches_per_push`
    fetches, so the weights of version v train fetches v * fetches_per_push up to (v + 1) * fetches_per_push - 1.

    groups_per_fetch       F
    fetches_per_push       U: fetches trained between two pushes
    num_fetches            of the whole run; None: until the data end
    max_staleness          K: versions between the weights that sampled a token and those that it trains, at most
    lead                   L, 0 ≤ L ≤ K: how far ahead of need groups are admitted, in versions
    in_flight              at a push: drain waits until no sample is in flight; retract and in_place push into running
                           samples: retract recomputes their KV cache under the new weights, in_place keeps it
    at_deadline            if groups that are due are not ready at a version's last fetch: wait for them, or drop them,
                           which trains fewer long answers
    spare_groups           admitted beyond what a version trains (over-sampling); the last ones are dropped
    samples_per_group      samples of one prompt
    max_samples_in_flight  over all engines; one group is admitted in any case
    max_tries              of a group whose samples fail, before it is dropped and replaced
    max_failures_in_row    groups dropped as failed since one became ready, before the run ends
    exclusive              engines and trainers share devices and alternate
    """

    groups_per_fetch: int = _knob(least=1)
    fetches_per_push: int = _knob(1, least=1, flag="update_weights_interval")
    num_fetches: int | None = _knob(None, least=1)
    max_staleness: int = _knob(0, least=0, flag="max_staleness")
    lead: float = _knob(0.0, flag="admission_lead")
    in_flight: Literal["drain", "retract", "in_place"] = _knob("drain", flag="in_flight")
    at_deadline: Literal["wait", "drop"] = _knob("wait", flag="at_deadline")
    spare_groups: int = _knob(0, least=0)
    samples_per_group: int = _knob(1, least=1)
    max_samples_in_flight: int = _knob(1 << 30, least=1, flag="max_samples_in_flight")
    max_tries: int = _knob(1, least=1, flag="max_group_tries")
    max_failures_in_row: int = _knob(1 << 30, least=1, flag="max_failed_groups")
    exclusive: bool = _knob(False)

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other.

        Raises:
            ValueError: a setting, its value and the cure.
        """
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
