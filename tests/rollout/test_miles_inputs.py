"""Functions and classes that take one `input`, as miles calls them, behind the calls that fusionrl makes."""

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.hooks import load_function
from fusionrl.data.sample import Sample
from fusionrl.rollout.miles_inputs import RolloutObject, generate_function

FILE = """
from miles.rollout.base_types import (
    GenerateFnInput, GenerateFnOutput, RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnEvalOutput,
    RolloutFnTrainInput, RolloutFnTrainOutput,
)
from miles.utils.types import Sample

MADE = []

class Rollout:
    keeps_groups = True

    def __init__(self, input: RolloutFnConstructorInput):
        MADE.append(self)
        self.args, self.source, self.seen = input.args, input.data_source, []

    async def __call__(self, input):
        self.seen.append((input.rollout_id, input.evaluation, self.args.lr, hasattr(self.args, "extra")))
        self.args.extra = 1
        if isinstance(input, RolloutFnEvalInput):
            return RolloutFnEvalOutput(data={"held": {"rewards": [1.0]}})
        assert isinstance(input, RolloutFnTrainInput)
        return RolloutFnTrainOutput(samples=self.source.get_samples(2), metrics={"seen": len(self.seen)})

class Plain(Rollout):
    def __call__(self, input):
        return [self.source.get_samples(1)]

async def several(input: GenerateFnInput) -> GenerateFnOutput:
    assert input.args is input.state.args and input.evaluation
    return GenerateFnOutput(samples=[input.sample, Sample(index=input.sampling_params["top_k"])])

async def bare(input):
    return input.sample

class Generate:
    num_calls = 0

    async def __call__(self, input):
        self.num_calls += 1
        return GenerateFnOutput(samples=Sample(index=self.num_calls))
"""


def source(name: str) -> Namespace:
    return Namespace(get_samples=lambda num: [name] * num)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "by_input.py"
    path.write_text(FILE)
    return str(path)


def test_a_class_is_made_once_and_sees_each_rollouts_args_and_source(file: str) -> None:
    function = RolloutObject(load_function(f"{file}:Rollout"))
    assert function.keeps_groups  # type: ignore[attr-defined]
    first = function(Namespace(lr=1.0), 0, source("a"))
    second = function(Namespace(lr=2.0), 1, source("b"), evaluation=False)
    found = function(Namespace(lr=3.0), 1, source("b"), evaluation=True)
    assert (first.samples, second.samples, second.metrics) == (["a", "a"], ["b", "b"], {"seen": 2})
    assert found.data == {"held": {"rewards": [1.0]}}
    (made,) = load_function(f"{file}:Rollout").__init__.__globals__["MADE"]  # type: ignore[misc]
    assert made.seen == [(0, False, 1.0, False), (1, False, 2.0, False), (1, True, 3.0, False)]


def test_an_evaluation_has_an_object_of_its_own_and_a_call_may_be_synchronous(file: str) -> None:
    train, evaluation = RolloutObject(load_function(f"{file}:Plain")), RolloutObject(load_function(f"{file}:Plain"))
    assert train(Namespace(), 0, source("a")) == [["a"]] and evaluation(Namespace(), 0, source("b")) == [["b"]]
    assert len(load_function(f"{file}:Plain").__init__.__globals__["MADE"]) == 2  # type: ignore[misc]


def test_generate_functions_of_one_input(file: str) -> None:
    args, sample = Namespace(generate_state=Namespace()), Sample(index=3)
    args.generate_state.args = args

    def call(name: str, evaluation: bool = False) -> Any:
        return asyncio.run(generate_function(f"{file}:{name}")(args, sample, {"top_k": 5}, evaluation=evaluation))

    first, second = call("several", evaluation=True)
    assert first is sample is call("bare") and second.index == 5
    assert [call("Generate").index for _ in range(2)] == [1, 2], "the object is made once"
