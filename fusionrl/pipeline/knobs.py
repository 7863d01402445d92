"""The controller's settings, and the pipelines, which are presets of them."""

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

NO_LIMIT = 1 << 30


def _knob(default: object = MISSING, help: str = "", *, least: int | None = None, given: object = None) -> Any:
    """Declare a knob and its least value; one with a help text has a flag of its name.

    `PipelineGroup` has these flags. `given` is the flag's default, None leaves the knob to the pipeline.
    """
    return field(default=default, metadata={"help": help, "least": least, "given": given})


@dataclass(frozen=True)
class Knobs:
    """One pipeline.

    A fetch is one rollout's batch of groups for the trainers. Weights are pushed after every U fetches, so the weights
    of version v train fetches v * U up to (v + 1) * U - 1.

    groups_per_fetch   F; U is update_weights_interval, K max_staleness, and L admission_lead, 0 ≤ L ≤ K, in versions
    num_fetches        of the whole run; None: until the data end
    spare_groups       admitted beyond what a version trains (over-sampling); the last ones are dropped
    samples_per_group  samples of one prompt
    exclusive          engines and trainers share devices and alternate
    """

    groups_per_fetch: int = _knob(least=1)
    max_staleness: int = _knob(
        0,
        "Maximum weight versions between sampling a token and training on it. Default: set by --pipeline.",
        least=0,
    )
    admission_lead: float = _knob(
        0.0,
        "How many batches ahead of need prompts are admitted, 0 to --max-staleness. Default: by --pipeline.",
        least=0,
    )
    update_weights_interval: int = _knob(
        1, "Rollouts trained between two weight pushes. Default: set by --pipeline.", least=1
    )
    in_flight: Literal["drain", "retract", "in_place"] = _knob(
        "drain",
        "Unfinished samples at a weight push: the push waits for them (drain), or they continue with the"
        " new weights, their KV cache recomputed (retract) or kept (in_place). Default: set by --pipeline.",
    )
    at_deadline: Literal["wait", "drop"] = _knob(  # to drop them trains fewer long answers
        "wait",
        "At a version's last batch, wait for groups that would be too old later, or drop them. Default: wait.",
    )
    max_samples_in_flight: int = _knob(  # one group is admitted in any case
        NO_LIMIT,
        "Maximum samples in flight over all engines. Default: --sglang-server-concurrency for each engine.",
        least=1,
    )
    max_group_tries: int = _knob(
        1, "Tries of a failed group, each from its prompt, before another group replaces it.", least=1, given=2
    )
    max_failed_groups: int = _knob(  # since a group became ready
        NO_LIMIT, "End the run after this many failed groups in a row.", least=1, given=32
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
        staleness, lead, in_flight = map(shown, ("max_staleness", "admission_lead", "in_flight"))
        if not 0 <= self.admission_lead <= self.max_staleness:
            raise ValueError(f"{lead} is {self.admission_lead:g}; give 0 to {staleness} ({self.max_staleness})")
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
        return self.groups_per_fetch * self.update_weights_interval

    @property
    def num_versions(self) -> int:
        """Return the most versions whose requests may be in flight at once, the one that is being pushed included."""
        return self.max_staleness + 2

    def staleness_error(self, what: str, sampled: int, newest: int) -> str | None:
        """Return why `what`, sampled by the version `sampled`, may not be trained by `newest`; None: it may.

        Versions count the rollouts that had trained the weights, as engines do; a push follows several of them.
        """
        age = newest // self.update_weights_interval - sampled // self.update_weights_interval
        if age <= self.max_staleness:
            return None
        return (
            f"{shown('max_staleness')} {self.max_staleness}: {what} of version {sampled}, and rollout {newest} would"
            f" train it, {age} versions later"
        )


# The knobs that a flag sets, by name.
FLAGS: dict[str, Field[Any]] = {knob.name: knob for knob in fields(Knobs) if knob.metadata["help"]}


def shown(name: str) -> str:
    """Return a knob as messages call it: by its flag, where it has one."""
    return f"--{name.replace('_', '-')}" if name in FLAGS else name


IN_TURN = "on-policy"  # one rollout after the other, without the controller
# Name → knobs that the pipeline sets; flags override them. The leads of async and async-partial were measured with
# `python -m tools.bench.pipelines paced --virtual`: a smaller lead leaves trainers waiting, a larger one makes tokens
# older and no step shorter. If pushes drain, groups admitted beyond one batch only wait.
PIPELINES: dict[str, dict[str, int | float | str]] = {
    "on-policy": {"max_staleness": 0, "admission_lead": 0.0, "update_weights_interval": 1, "in_flight": "drain"},
    "stream": {"max_staleness": 0, "admission_lead": 0.0, "update_weights_interval": 4, "in_flight": "drain"},
    "one-step-off": {"max_staleness": 1, "admission_lead": 1.0, "update_weights_interval": 1, "in_flight": "drain"},
    "async": {"max_staleness": 2, "admission_lead": 1.0, "update_weights_interval": 1, "in_flight": "drain"},
    "async-partial": {"max_staleness": 2, "admission_lead": 1.5, "update_weights_interval": 1, "in_flight": "retract"},
}
