"""Rollout, reward and filter functions of the Buffer's tests, and notes of how they were called."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from fusionrl.buffer.data_source import RolloutDataSourceWithBuffer
from fusionrl.data.sample import Sample
from fusionrl.rollout.types import DynamicFilterOutput, RolloutAborted, RolloutFnTrainOutput

CALLS: list[Any] = []
MEETING = threading.Barrier(2)


def fill(group: list[Sample]) -> list[Sample]:
    for sample in group:
        sample.tokens = [1, 2, 3, 4]
        sample.response, sample.response_length = f"answer {sample.index}", 2
        sample.rollout_log_probs = [-1.0, -2.0]
        sample.status = Sample.Status.COMPLETED
    return group


def bare_lists(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """As written for slime: synchronous, lists for arrays, a list of groups, rewards left to the caller."""
    CALLS.append(rollout_id)
    if evaluation:
        return {"set": {"rewards": [1.0, 0.0], "samples": fill([Sample(index=0), Sample(index=1)])}}
    return [fill(group) for group in data_source.get_samples(args.rollout_batch_size)]


def meets(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout and an evaluation, of which neither ends before the other has begun."""
    MEETING.wait(20)
    return bare_lists(args, rollout_id, data_source, evaluation)


def two_versions(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Its evaluation has a sample of weights from before a push, and one of those after it."""
    samples = fill([Sample(index=0), Sample(index=1)])
    for version, sample in enumerate(samples):
        sample.weight_versions = [version] * sample.response_length
    return {"set": {"rewards": [1.0, 0.0], "samples": samples}}


def taught(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    groups = bare_lists(args, rollout_id, data_source)
    for sample in (sample for group in groups for sample in group):
        sample.teacher_log_probs = [-token / 8 for token in sample.tokens[-2:]]
    return groups


def without_numbers(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Samples of its own making, which belong together by the list they stand in alone."""
    return [
        [fill([Sample(index=2 * g + i, label=str(g), reward=float(i))])[0] for i in range(2)]
        for g in range(args.rollout_batch_size)
    ]


def one_group_short(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    CALLS.append(rollout_id)
    groups = data_source.get_samples(1)
    return RolloutFnTrainOutput(
        [fill(group) for group in groups], {"rollout/dropped_mine": 1, "rollout/calls": len(CALLS)}
    )


def too_many(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return [fill(group) for group in data_source.get_samples(args.rollout_batch_size + 2)]


def with_refused(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    groups = [fill(group) for group in data_source.get_samples(args.rollout_batch_size + 2)]
    return SimpleNamespace(samples=groups[2:], metrics={}, refused=groups[:2])


def see_order(args: Any, groups: Any, get_samples: Any) -> None:
    CALLS.append(("order", [group[0].index for group in groups]))


def nothing(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    CALLS.append(rollout_id)
    return []


def sleeps(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Blocks its thread, as a function that knows nothing of event loops; looks for an abort now and then."""
    groups = data_source.get_samples(args.rollout_batch_size)
    for _ in range(500):
        time.sleep(0.01)
        if args.abort_event.is_set():
            data_source.add_samples(groups)
            raise RolloutAborted("told to stop")
    return groups


def _note(args: Any, sample: Sample) -> None:
    """Reward functions run in other processes; they note in a file whom they scored."""
    with (Path(args.run_dir) / "scored.txt").open("a") as file:
        file.write(f"{sample.index}\n")


async def parity(args: Any, sample: Sample, **kwargs: Any) -> float:
    _note(args, sample)
    return float((sample.index or 0) % 2)


async def by_label(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Groups with an odd label differ; those with an even one do not."""
    _note(args, sample)
    return float((sample.index or 0) % 2 and int(sample.label) % 2)


async def several(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"right": float((sample.index or 0) % 2), "style": 0.5}


def differing(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(len({s.reward for s in samples}) > 1, "flat")


class OwnSource:
    """A data source of a user's: keeps its state itself, by slime's `save` and `load`."""

    saved: ClassVar[dict[int, int]] = {}

    def __init__(self, args: Any) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 100

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self.position += num_samples
        return [[Sample(index=0), Sample(index=1)] for _ in range(num_samples)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.position -= len(samples)

    def save(self, rollout_id: int) -> None:
        OwnSource.saved[rollout_id] = self.position

    def load(self, rollout_id: int) -> None:
        self.position = OwnSource.saved[rollout_id]


def keep_even(args: Any, groups: list[list[Sample]]) -> None:
    for group in groups:
        group[1].remove_sample = True


def report(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, Any], time_s: float) -> bool:
    CALLS.append((rollout_id, len(samples), time_s >= 0))
    metrics["rollout/mine"] = 3.0
    return True


def report_besides(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, Any], time_s: float) -> None:
    CALLS.append(len(samples))


def same(args: Any, sample: Sample, **kwargs: Any) -> float:
    return 0.5


def graded(args: Any, sample: Sample, **kwargs: Any) -> float:
    return (sample.index * 7 % 11) / 3.0


def breaks(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("mine")


def misaligned(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    groups = [fill(group) for group in data_source.get_samples(args.rollout_batch_size)]
    groups[1][0].loss_mask = [1]
    return groups


class SlimeSource(RolloutDataSourceWithBuffer):
    """As slime's users derive theirs: more state, in `save` and `load`."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.num_calls = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self.num_calls += 1
        return super().get_samples(num_samples)

    def save(self, rollout_id: int) -> None:
        super().save(rollout_id)
        Path(self.args.save, f"calls_{rollout_id}").write_text(str(self.num_calls))

    def load(self, rollout_id: int | None = None) -> None:
        super().load(rollout_id)
        self.num_calls = int(Path(self.args.save, f"calls_{rollout_id}").read_text())


def newest_first(args: Any, rollout_id: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """A buffer filter that takes out what it returns, as slime's do, and discards stale groups."""
    CALLS.append((rollout_id, len(buffer), num_samples))
    buffer[:] = [group for group in buffer if not group[0].metadata.get("stale")]
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def most_finished(args: Any, rollout_id: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """A buffer filter that leaves them in."""
    return sorted(buffer, key=lambda group: -group[0].response_length)[:num_samples]


ANSWER: list[Any] = [None]  # of `answers`


def answers(args: Any, *given: Any) -> Any:
    """A hook that returns what the test says: `ANSWER`, a function of what the hook gets."""
    return ANSWER[0](*given)


def _ratio(sample: Sample) -> float:
    assert sample.index is not None
    return 1 / (sample.index - 3)


async def ratio(args: Any, sample: Sample, **kwargs: Any) -> float:
    return _ratio(sample)


def ratios_of_a_group(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [_ratio(sample) for sample in samples]


def ratios(args: Any, samples: list[Sample]) -> Any:
    return [_ratio(sample) for sample in samples], []


def ratio_in_a_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    groups = bare_lists(args, rollout_id, data_source)
    for group in groups:
        for sample in group:
            sample.reward = _ratio(sample)
    return groups


def gives_none(*args: Any, **kwargs: Any) -> None: ...


class Unwritable:
    def __repr__(self) -> str:
        raise TypeError("not to be shown")


def leaves_a_trap(args: Any, samples: list[Sample]) -> Any:
    for sample in samples:
        sample.metadata["trap"] = Unwritable()
    raise KeyError("mine")


def looks_at_one(rollout_id: int, args: Any, data: dict[str, Any], metrics: dict[str, Any]) -> bool:
    sample = data["set"]["samples"][1]
    return bool(sample.metadata["no such"])


class Breaking(RolloutDataSourceWithBuffer):
    """A test has one of its methods raise."""


def backwards(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    """A conversion that reorders the samples and leaves some out."""
    kept = samples[:1:-1]
    return {
        "tokens": [s.tokens for s in kept],
        "response_lengths": [s.response_length for s in kept],
        "rewards": [float(s.reward) for s in kept],  # type: ignore[arg-type]
        "sample_indices": [s.index for s in kept],
    }


def backwards_without_indices(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    return {name: values for name, values in backwards(args, samples).items() if name != "sample_indices"}


def loses_the_first(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The first sample of each group fails before it is scored, the last one is aborted."""
    groups = bare_lists(args, rollout_id, data_source)
    for group in groups:
        group[0].status, group[-1].status = Sample.Status.FAILED, Sample.Status.ABORTED
    return groups


def of_several_versions(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Of each group the first sample was begun two pushes ago, the others are new; the last has no versions."""
    groups = bare_lists(args, rollout_id, data_source)
    for group in groups:
        for sample in group:
            sample.weight_versions = [5, 5]
        group[0].weight_versions = [3, 5]
    groups[-1][-1].weight_versions = None
    return groups


def dies_at_the_first(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Ends its process at the first answer to each prompt; the others are graded."""
    if sample.index % 6 == 0:
        os._exit(1)
    return float(1 + sample.index % 6)
