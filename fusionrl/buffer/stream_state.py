"""What a stream keeps of its groups: their samples, also in a checkpoint; ages of tokens, their bound; metrics.

A token's version counts the rollouts that its weights were trained on; the controller's counts pushes, of which there
may be one for several rollouts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample, Status, response_mask
from fusionrl.data.sample_fields import UNKNOWN_VERSION
from fusionrl.data.sample_images import prompt_of
from fusionrl.data.sample_json import pack_sample, unpack_sample
from fusionrl.pipeline.controller import apply, base_limit
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import Action, Drop, EndedGroups, Group, State, Wait


class SavedStream(TypedDict):
    """A stream in a checkpoint, as values for JSON.

    settings  the knobs on which places and versions depend
    state     of the controller (`State.to_dict`)
    groups    ordinal → {"blank": samples as they came from the data, "made": with answers and rewards, or "parked"}
    """

    settings: list[int]
    state: dict[str, Any]
    groups: dict[str, dict[str, list[dict[str, object]]]]


@dataclass
class StreamGroup:
    """A group that has not ended."""

    blank: list[Sample]  # as it came from the data
    finished: list[Sample] = field(default_factory=list)  # as it is when it is ready
    parked: list[Sample] = field(default_factory=list)  # as a function handed it back, with a part of its answers
    is_in_cursor: bool = field(default=False, init=False)  # a cursor had it


def packed(state: Mapping[str, Any], held: Mapping[int, StreamGroup], knobs: Knobs) -> SavedStream:
    """Return what a checkpoint keeps; of each group in `state` there is one in `held`."""
    groups = {}
    for ordinal, *_ in state["groups"]:
        group = held[ordinal]
        groups[str(ordinal)] = {"blank": [pack_sample(sample) for sample in group.blank]}
        if group.finished:
            groups[str(ordinal)]["made"] = [pack_sample(sample) for sample in group.finished]
        elif group.parked:
            groups[str(ordinal)]["parked"] = [pack_sample(sample) for sample in group.parked]
    return {"settings": _settings(knobs), "state": dict(state), "groups": groups}


def unpacked(saved: SavedStream, knobs: Knobs, num_trained: int) -> tuple[State, dict[int, StreamGroup]]:
    """Return the controller's state and the groups, for a run that resumes after `num_trained` fetches.

    If the settings differ from the checkpoint's, its versions and places have another meaning: then the groups are
    generated again, before any other. ValueError: it is not a saved stream.
    """
    try:
        held = {
            int(ordinal): StreamGroup(*(_unpacked(group.get(name, [])) for name in ("blank", "made", "parked")))
            for ordinal, group in saved["groups"].items()
        }
        if saved["settings"] != _settings(knobs) or saved["state"]["num_trained"] != num_trained:
            return _anew(list(held.values()), knobs, num_trained)
        born = {group[0]: group[2] for group in saved["state"]["groups"]}
        if born.keys() != held.keys():
            raise ValueError(f"its groups are {sorted(born)}, and there are samples of {sorted(held)}")
        ages = {}
        for ordinal, group in held.items():
            oldest = oldest_version(group.finished or group.parked, knobs.update_weights_interval)
            if group.finished or oldest is not None:
                ages[ordinal] = born[ordinal] if oldest is None else min(born[ordinal], oldest)
        state = State.from_dict(saved["state"], knobs.update_weights_interval, ages)
        for ordinal in [ordinal for ordinal, group in held.items() if not group.finished and not group.blank]:
            # A function had it from elsewhere, it was being trained, and earlier checkpoints do not have it.
            apply(state, knobs, Drop(ordinal, "surplus"))
            del held[ordinal]
        return state, held
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
        raise ValueError(
            f"what the checkpoint holds of the stream cannot be read ({error!r:.300}); resume from another one"
        ) from error


def blanks(saved: SavedStream) -> list[list[Sample]]:
    """Return the groups as they came from the data, in its order: for a run without a stream."""
    in_order = sorted(saved["groups"].items(), key=lambda item: int(item[0]))
    return [_unpacked(group["blank"]) for _, group in in_order if group["blank"]]


def fresh_state(knobs: Knobs, num_trained: int) -> State:
    """Return the state after `num_trained` fetches, where nothing is under way."""
    num_groups = num_trained * knobs.groups_per_fetch
    return State(
        ended=EndedGroups(num_groups),
        next_ordinal=num_groups,
        version=num_trained // knobs.update_weights_interval,
        num_fetched=num_trained,
        num_trained=num_trained,
    )


def _anew(groups: list[StreamGroup], knobs: Knobs, num_trained: int) -> tuple[State, dict[int, StreamGroup]]:
    state = fresh_state(knobs, num_trained)
    held = {}
    for group in (group for group in groups if group.blank):
        ordinal, state.next_ordinal = state.next_ordinal, state.next_ordinal + 1
        state.groups[ordinal] = Group(ordinal, "pending", state.version)
        held[ordinal] = StreamGroup(group.blank)
    return state, held


def _unpacked(group: list[dict[str, object]]) -> list[Sample]:
    return [unpack_sample(sample) for sample in group]


def _settings(knobs: Knobs) -> list[int]:
    return [knobs.groups_per_fetch, knobs.update_weights_interval, knobs.max_staleness, knobs.samples_per_group]


METRICS = """
perf/time_wait_batch_s | seconds | Of that, while fewer groups were ready than a batch takes. | --pipeline that runs
    ahead
perf/time_wait_deadline_s | seconds | Of that, while a batch was ready and stood back for groups that would be too old
    later. | --pipeline that runs ahead
pipeline/in_flight | samples | Under way in engines. | --pipeline that runs ahead
pipeline/running | groups | With samples that are under way. | --pipeline that runs ahead
pipeline/ready | groups | Ready, and not yet taken for training. | --pipeline that runs ahead
pipeline/parked | groups | Begun, and waiting to continue. | --pipeline that runs ahead
pipeline/admitted | groups | Admitted and not dropped: trained, under way or ready. | --pipeline that runs ahead
pipeline/credits | groups | That may be admitted and not yet be taken for training: the bound and the lead. |
    --pipeline that runs ahead
pipeline/credits_used | groups | Of these, that are under way, parked or ready; more than there are where your rollout
    function took prompts beyond the bound. | --pipeline that runs ahead
pipeline/tokens_generated | tokens | Response tokens of samples that ended since the batch before, tools' tokens
    included. | --pipeline that runs ahead
pipeline/tokens_trained | tokens | Of the batch, with a loss mask. | --pipeline that runs ahead
pipeline/tokens_dropped | tokens | Of samples that ended and whose group was dropped: by a filter, at a deadline, as
    surplus. | --pipeline that runs ahead
pipeline/tokens_prefilled_again | tokens | Prompt and response tokens whose KV cache was computed again because a push
    came while their sample was under way, of samples that ended; 0 with --in-flight drain and in_place. | --pipeline
    that runs ahead
pipeline/length_trained_by_offered | ratio | Mean response length of the samples that were trained, divided by that of
    all that were generated, since the run was started or resumed. Below 1: long answers are trained less often. |
    --pipeline that runs ahead
"""


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
        """Return the metrics since the last call, and begin anew: the trainers have their batch."""
        holds = self._holds & {_IDLE}
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


def oldest_version(samples: Sequence[Sample], update_weights_interval: int) -> int | None:
    """Return the controller's version of the oldest token that is trained; None where none is known."""
    oldest = [versions.min() for sample in samples if len(versions := trained_versions(sample))]
    return int(min(oldest)) // update_weights_interval if oldest else None


def trained_versions(sample: Sample) -> np.ndarray:
    """[n] versions of the tokens of a sample that are trained on, those that are known."""
    versions = sample.array("weight_versions")
    if versions is None:
        return np.zeros(0, np.int32)
    versions = versions[response_mask(sample) > 0]
    return versions[versions != UNKNOWN_VERSION]


def without_answer(sample: Sample) -> Sample:
    """Return the sample as its prompt came, where it has an answer: one that another run left, of older weights."""
    if not sample.response_length:
        return sample
    blank = prompt_of(sample)
    blank.index, blank.session_id = sample.index, sample.session_id
    return blank


def check_not_older(samples: Sequence[Sample], born: int) -> None:
    """Refuse tokens, put in by a function, of weights that are older than the group's start, version `born`."""
    for sample in samples:
        versions = trained_versions(sample)
        if len(versions) and versions.min() < born:
            raise HookError(
                f"--max-staleness: sample {sample.index} has a token of version {versions.min()}, but its prompt was"
                f" begun under version {born}; a function must bring tokens of now",
                [sample],
            )


def check_bound(groups: Sequence[Sequence[Sample]], version: int, knobs: Knobs) -> None:
    """Hold every sample and token that is about to be trained to --max-staleness; a function may break it."""
    for sample in (sample for group in groups for sample in group):
        versions = trained_versions(sample)
        error = knobs.staleness_error(f"sample {sample.index} has a token", int(versions.min(initial=version)), version)
        if error is not None:
            raise HookError(error, [sample])
