"""Metrics of a stream: the controller's state at a batch, tokens since the batch before, and how long was waited."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fusionrl.data.sample import Sample, Status, response_mask
from fusionrl.data.sampling import UNKNOWN_VERSION
from fusionrl.pipeline.controller import base_limit
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import Action, State, Wait


def state_numbers(state: State, knobs: Knobs) -> dict[str, float]:
    """Return the metrics of a state whose next fetch has started.

    Credits are the groups that may be admitted but not fetched yet, by the bound, the lead and spare groups.
    """
    fetched = state.num_fetched * knobs.groups_per_fetch
    return {
        "pipeline/in_flight": float(state.samples_in_flight),
        "pipeline/running": float(len(state.of("running"))),
        "pipeline/ready": float(len(state.of("ready"))),
        "pipeline/parked": float(sum(group.has_tokens for group in state.of("pending"))),
        "pipeline/admitted": float(state.committed),
        "pipeline/credits": float(max(0, base_limit(state, knobs) + knobs.spare_groups - fetched)),
        "pipeline/credits_used": float(max(0, state.committed - fetched)),
    }


_FAILED = (Status.FAILED, Status.ABORTED)


class TokenCounts:
    """Counts of tokens since the last batch; lengths of responses over the whole run.

    A sample counts as generated when its group ends or is given up, and then as trained or dropped. Of a group that is
    given up in flight, the samples that have ended count; the tokens of the others are unknown. A group that is
    retried starts again.
    """

    def __init__(self) -> None:
        self._begun: dict[int, Sequence[Sample]] = {}
        self._made: dict[int, Sequence[Sample]] = {}
        self._generated = self._dropped = self._prefilled = 0
        self._offered, self._trained = np.zeros(2), np.zeros(2)  # samples, and tokens of their responses

    def began(self, ordinal: int, group: Sequence[Sample]) -> None:
        """Note the samples of a group that engines begin to answer; they are read again where it is given up."""
        self._begun[ordinal] = group

    def generated(self, ordinal: int, samples: Sequence[Sample]) -> None:
        """Count the samples of a group that the engines have answered."""
        self._begun.pop(ordinal, None)
        self._made[ordinal] = samples
        for sample in samples:
            self._generated += sample.response_length
            self._prefilled += prefilled_again(sample)
            if sample.response_length and sample.status not in _FAILED:
                self._offered += 1, sample.response_length

    def dropped(self, ordinal: int) -> None:
        """Count a group that is given up, or whose samples are: it will not be trained with them."""
        if ordinal in self._begun:
            self.generated(ordinal, self._begun[ordinal])
        self._dropped += sum(sample.response_length for sample in self._made.pop(ordinal, ()))

    def take(self, trained: Mapping[int, Sequence[Sample]], prefills: bool) -> dict[str, float]:
        """Return the metrics of a batch that trains these groups, and begin anew.

        prefills  a new version within a response means that its KV cache was computed again
        """
        num_trained = 0
        for ordinal, samples in trained.items():
            is_of_this_start = self._made.pop(ordinal, None) is not None  # else a checkpoint had its answers
            for sample in samples:
                counts = int((response_mask(sample) > 0).sum())
                num_trained += counts
                if counts and is_of_this_start:
                    self._trained += 1, sample.response_length
        metrics = {
            "pipeline/tokens_generated": float(self._generated),
            "pipeline/tokens_trained": float(num_trained),
            "pipeline/tokens_dropped": float(self._dropped),
            "pipeline/tokens_prefilled_again": float(self._prefilled if prefills else 0),
        }
        self._generated = self._dropped = self._prefilled = 0
        if self._trained[0] and self._offered[0]:
            mean_trained, mean_offered = (tokens / samples for samples, tokens in (self._trained, self._offered))
            metrics["pipeline/length_trained_by_offered"] = float(mean_trained / mean_offered)
        return metrics


def prefilled_again(sample: Sample) -> int:
    """Return the tokens whose KV cache new weights computed again: at each change of version, all those before it."""
    versions = sample.array("weight_versions")
    if versions is None or not len(versions):
        return 0
    known = np.flatnonzero(versions != UNKNOWN_VERSION)
    changes = known[1:][np.diff(versions[known]) != 0]
    prompt = sample.num_tokens - sample.response_length
    return int((prompt + changes).sum())


_IDLE, _ALL = "idle", "all"


class StreamClock:
    """Adds up seconds that trainers waited and engines had nothing to do; each note holds until the next."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._holds: set[str] = {_IDLE}

    def note(self, now: float, reason: str | None, has_work: bool) -> None:
        """Note what holds from now on.

        reason    `Wait.reason` of a driver that waits for a batch; None where it does not
        has_work  samples are under way, and no push holds them up
        """
        passed = 0.0 if self._since is None else now - self._since
        for name in (_ALL, *self._holds):
            self._seconds[name] += passed
        self._since = now
        self._holds = ({reason} if reason else set()) | (set() if has_work else {_IDLE})

    def take(self, now: float) -> dict[str, float]:
        """Return the metrics since the last call, and begin anew."""
        holds = self._holds
        self.note(now, None, True)
        self._holds = holds
        seconds, self._seconds = self._seconds, defaultdict(float)
        return {
            "perf/time_wait_batch_s": seconds["batch"],
            "perf/time_wait_deadline_s": seconds["deadline"],
            "perf/engines_idle": seconds[_IDLE] / seconds[_ALL] if seconds[_ALL] > 0 else 0.0,
        }


def reason_of(actions: Iterable[Action]) -> str | None:
    """Return why the trainers get no batch; None where they wait for none."""
    waits = (action for action in actions if isinstance(action, Wait) and action.who == "trainers")
    return next((action.reason for action in waits if action.reason), None)
