"""Generate, reward and filter functions of the rollout tests, and notes of how they were called."""

import asyncio
import copy
import os
from dataclasses import dataclass, field
from typing import Any

from fusionrl.data.sample import Sample
from fusionrl.rollout.types import DynamicFilterOutput


@dataclass
class State:
    """What the functions saw, and how they are to behave."""

    slow: set[str] = field(default_factory=set)
    pause_s: float = 0.0
    started: int = 0
    running: int = 0
    most_running: int = 0
    version: int = 0
    temperatures: set[float] = field(default_factory=set)
    params: list[dict[str, Any]] = field(default_factory=list)
    evaluations: set[bool] = field(default_factory=set)

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


STATE = State()


def fill(sample: Sample, text: str = "ok") -> Sample:
    sample.tokens = [*(sample.prompt_tokens if sample.prompt_tokens is not None else [1]), 65, 66]
    sample.response, sample.response_length = text, 2
    sample.rollout_log_probs = [-1.0, -1.0]
    sample.status = Sample.Status.COMPLETED
    return sample


async def generate(args: Any, sample: Sample, params: dict[str, Any], evaluation: bool = False) -> Sample:
    STATE.started += 1
    STATE.running += 1
    STATE.most_running = max(STATE.most_running, STATE.running)
    STATE.temperatures.add(params["temperature"])
    STATE.params.append(params)
    STATE.evaluations.add(evaluation)
    try:
        sample.metadata["half"] = True  # a hook may write on what it was handed; a prompt handed back is clean
        await asyncio.sleep(3600 if sample.prompt in STATE.slow else STATE.pause_s)
    finally:
        STATE.running -= 1
    return fill(sample)


async def says_its_temperature(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    STATE.started += 1
    STATE.temperatures.add(params["temperature"])
    return fill(sample, str(params["temperature"]))


async def fails_greedily(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    fill(sample)
    if sample.prompt == "p1" and params["temperature"] == 0.0:
        sample.status = Sample.Status.FAILED
    return sample


async def rewards_itself(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    sample.reward = 0.125
    return fill(sample)


async def makes_new_samples(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    return fill(copy.deepcopy(sample), "new")


async def makes_bare_samples(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    return fill(Sample(prompt=sample.prompt, label=sample.label))


async def two_for_one(args: Any, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    return [fill(copy.deepcopy(sample)), fill(copy.deepcopy(sample))]


def synchronous(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    return fill(sample)


async def label_parity(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(int(sample.label) % 2)


async def dies_at_the_greedy_answer_to_p1(args: Any, sample: Sample, **kwargs: Any) -> float:
    if sample.prompt == "p1" and sample.response == "0.0":
        os._exit(1)
    return 1.0


async def several(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"x": 1.0, "y": 2.0}


async def raises_at_p2(args: Any, sample: Sample, **kwargs: Any) -> float:
    return 1 / 0 if sample.prompt == "p2" else 1.0


async def group_rank(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    for sample in samples:  # this runs in another process: what it notes must be on what it was handed
        sample.metadata["scored"] = sample.metadata.get("scored", 0) + 1
    return [float(i) for i in range(len(samples))]


async def group_lengths(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(sample.response_length) for sample in samples]


async def second_of_p1_is_slow(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    is_fast = sample.prompt == "p1" and sample.index == 2
    return fill(sample) if is_fast else await stepwise(args, sample, params)


def only_odd(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(samples[0].reward == 1.0, "even")


def odd_while_there_are(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(samples[0].reward == 1.0, "even", keep_when_insufficient=True)


def bare_bool(args: Any, samples: list[Sample], **kwargs: Any) -> bool:
    return samples[0].reward == 1.0


async def stepwise(args, sample, sampling_params):
    """Ten tokens, one at a time; stops in between when it is told to. A slow prompt stays at its third until then."""
    sample.tokens = sample.tokens if sample.response_length else [1, 2]
    STATE.started += 1
    while sample.response_length < 10:
        if args.is_stopping():
            sample.status = Sample.Status.ABORTED
            return sample
        count = sample.response_length
        values = {"log_probs": [-0.5 - count], "versions": STATE.version, "text": str(count)}
        sample.append_response_tokens(args, tokens=[10 + count], **values)
        await asyncio.sleep(0.001)
        while sample.prompt in STATE.slow and sample.response_length >= 3 and not args.is_stopping():
            await asyncio.sleep(0.001)
    sample.status = Sample.Status.COMPLETED
    return sample


async def mask_too_long(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    sample = fill(sample)
    sample.loss_mask = [1, 1, 1]
    return sample


async def a_string(args: Any, sample: Sample, params: dict[str, Any]) -> Any:
    return "text"


def breaks_at_once(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    raise KeyError("mine")


def returns_nothing(args: Any, samples: list[Sample], **kwargs: Any) -> None: ...


async def breaks(args: Any, sample: Sample, *rest: Any, **kwargs: Any) -> Any:
    raise KeyError("mine")


async def note_the_rollout(args: Any, sample: Sample, *, rollout_id: Any = None, evaluation: bool = False) -> None:
    sample.metadata["seen"] = (rollout_id, evaluation, sample.reward)


def replace(args: Any, sample: Sample, *, rollout_id: Any = None, evaluation: bool = False) -> Sample:
    made = copy.deepcopy(sample)
    made.response += " hooked"
    return made
