"""The calls of miles' functions: one `input` in place of several arguments, and classes that are made objects once.

class Mine:                                                 --rollout-function-path, --eval-function-path
    def __init__(self, input: RolloutFnConstructorInput): …
    async def __call__(self, input: RolloutFnTrainInput | RolloutFnEvalInput): …

async def generate(input: GenerateFnInput) -> GenerateFnOutput: …           --custom-generate-function-path
"""

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fusionrl.config.hooks import load_function
from fusionrl.data.sample import Sample
from fusionrl.rollout.event_loop import run
from fusionrl.rollout.generate_state import GenerateState
from fusionrl.rollout.types import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """Flags and data source of a rollout object; `args` always has the values of the current rollout."""

    args: Namespace
    data_source: DataSource


@dataclass(frozen=True)
class RolloutFnBaseInput:
    """The number of the rollout, and whether it is an evaluation."""

    rollout_id: int
    evaluation: ClassVar[bool] = False


@dataclass(frozen=True)
class RolloutFnTrainInput(RolloutFnBaseInput):
    """A rollout to train on; `weight_version` is None: each sample has its own."""

    weight_version: int | None = None


@dataclass(frozen=True)
class RolloutFnEvalInput(RolloutFnBaseInput):
    """An evaluation by the run's own engines; the other fields are None."""

    generate_state: GenerateState | None = None
    weight_version: str | None = None
    hf_dir: str | None = None
    evaluation: ClassVar[bool] = True


RolloutFnInput = RolloutFnTrainInput | RolloutFnEvalInput
RolloutFnOutput = RolloutFnTrainOutput | RolloutFnEvalOutput


@dataclass(frozen=True)
class GenerateFnInput:
    """The sample to generate, and its sampling parameters."""

    state: GenerateState
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> Namespace:
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    """One sample, or several that were made of one."""

    samples: Sample | list[Sample]


class _Source:
    current: object = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


class RolloutObject:
    """A rollout function over an object of a user's class, which is created at the first call."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        self._kind = kind
        self._made: Any = None
        self._args, self._source = Namespace(), _Source()
        self.keeps_groups = getattr(kind, "keeps_groups", None)

    def __call__(self, args: Namespace, rollout_id: int, data_source: object, evaluation: bool = False) -> object:
        # The object keeps what it was made of; each rollout brings other `args`.
        vars(self._args).clear()
        vars(self._args).update(vars(args))
        self._source.current = data_source
        if self._made is None:
            self._made = self._kind(RolloutFnConstructorInput(self._args, self._source))
        output = self._made((RolloutFnEvalInput if evaluation else RolloutFnTrainInput)(rollout_id))
        return run(output) if inspect.iscoroutine(output) else output


@functools.cache
def generate_function(path: str) -> Callable[..., Any]:
    """Return the generate function of a path that takes miles' input with slime's signature."""
    function = load_function(path)
    target: Any = function() if inspect.isclass(function) else function

    async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
        output = await target(GenerateFnInput(GenerateState(args), sample, sampling_params, evaluation))
        return output.samples if isinstance(output, GenerateFnOutput) else output

    return generate
