"""The controller's settings, and the pipelines, which are presets of them."""

from dataclasses import dataclass
from typing import Literal

InFlight = Literal["drain", "retract", "in_place"]
AtDeadline = Literal["wait", "drop"]


@dataclass(frozen=True)
class Knobs:
    """One pipeline.

    A fetch is one rollout's batch of groups for the trainers. Weights are pushed after every `fetches_per_push`
    fetches, so the weights of version v train fetches v * fetches_per_push up to (v + 1) * fetches_per_push - 1.

    groups_per_fetch       F
    fetches_per_push       U: fetches trained between two pushes (slime's --update-weights-interval)
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

    groups_per_fetch: int
    fetches_per_push: int = 1
    num_fetches: int | None = None
    max_staleness: int = 0
    lead: float = 0.0
    in_flight: InFlight = "drain"
    at_deadline: AtDeadline = "wait"
    spare_groups: int = 0
    samples_per_group: int = 1
    max_samples_in_flight: int = 1 << 30
    max_tries: int = 1
    max_failures_in_row: int = 1 << 30
    exclusive: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other.

        Raises:
            ValueError: a setting, its value and the cure.
        """
        least = {"groups_per_fetch": 1, "fetches_per_push": 1, "max_staleness": 0, "spare_groups": 0, "max_tries": 1}
        least |= {"samples_per_group": 1, "max_samples_in_flight": 1, "max_failures_in_row": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least {value}")
        if self.num_fetches is not None and self.num_fetches < 1:
            raise ValueError(f"num_fetches is {self.num_fetches}; give at least 1, or none")
        if not 0 <= self.lead <= self.max_staleness:
            raise ValueError(f"lead is {self.lead:g}; give 0 to max_staleness ({self.max_staleness})")
        if self.spare_groups and self.max_staleness:
            # They are dropped at the end of their version, and groups of such a pipeline may be trained later.
            raise ValueError(
                f"spare_groups is {self.spare_groups} with max_staleness {self.max_staleness}; give lead instead"
            )
        if self.exclusive and (self.max_staleness or self.in_flight != "drain"):
            raise ValueError(
                "engines and trainers share devices, so nothing runs ahead: give max_staleness 0 and in_flight drain"
            )
        if self.in_flight != "drain" and not self.max_staleness:
            # The first tokens of samples that continue under new weights are a version old.
            raise ValueError(f"in_flight is {self.in_flight}; give max_staleness of at least 1")

    @property
    def groups_per_version(self) -> int:
        """B: groups that one version of the weights trains."""
        return self.groups_per_fetch * self.fetches_per_push


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
