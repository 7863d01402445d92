"""The default rollout: prompts → samples by the engines behind the router → rewards → filter.

`generate_rollout` is synchronous, as slime's is; the Buffer runs it in a thread of its own. Inside, one event loop
keeps a bounded number of requests in flight. The functions here have slime's signatures; `generate.py` makes turns,
samples and groups, by the clients of `generate_state.py`.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from fusionrl.config.eval_sets import EvalSet, eval_sets
from fusionrl.config.hooks import HookError, call_hook
from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import load_prompts
from fusionrl.data.sample import Sample, reward_value
from fusionrl.data.sample_images import keep_images
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.client import abort_all
from fusionrl.rollout.generate import (
    SampleContext,
    SamplingParams,
    flat_group,
    generate,
    generate_and_score,
    generate_group,
    generate_turn,
    prompt_tokens,
    room,
    stream_generate,
)
from fusionrl.rollout.generate_state import (
    GenerateState,
    get_rollout_num_engines,
    request_counts,
    rollout_client,
    sampling_params,
)
from fusionrl.rollout.types import (
    DataSource,
    DynamicFilterOutput,
    EvalResult,
    RolloutAborted,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
)

if TYPE_CHECKING:
    from fusionrl.rollout.teacher import Teacher

__all__ = [
    "GenerateState",
    "abort",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_turn",
    "get_rollout_num_engines",
    "load_tokenizer",
    "prompt_tokens",
    "room",
    "sampling_params",
    "stream_generate",
]

Task = asyncio.Task[list[Sample | list[Sample]]]
ABORT_TIMEOUT_S = 30.0  # for engines to let go of what is aborted
MAX_DROPPED = 50  # dropped groups for each one wanted, before a filter that keeps next to nothing ends the run

METRICS = """
rollout/dropped_<reason> | groups | Groups that were generated and not used, by reason: that of
    --dynamic-sampling-filter-path, `filtered` without one, `surplus` where there were more than enough. | when it
    happens
rollout/unused_groups | groups | Groups that were under way when the rollout had enough: those that finish first are
    trained, so the run does not repeat bit by bit. | when it happens
rollout/partial_samples | samples | Unfinished samples that the next rollout continues. | --partial-rollout
"""


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate `args.rollout_batch_size` groups, or evaluate every set of --eval-prompt-data or --eval-config."""
    args.rollout_id = rollout_id
    if evaluation:
        return asyncio.run(evaluate_sets(args))
    return asyncio.run(generate_groups(args, data_source))


# ------------------------------------------------------------------------------------------------ one sample
async def generate_and_rm(
    args: Namespace, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample and score it, each by the user's function where there is one.

    From any rollout function, thread and event loop; so the two below.
    """
    return await generate_and_score(SampleContext.of_args(args), sample, sampling_params, evaluation)


async def generate_and_rm_group(
    args: Namespace, group: list[Sample], sampling_params: SamplingParams, evaluation: bool = False
) -> Sequence[Sample | list[Sample]]:
    """Make all samples of one prompt; with --group-rm they are scored together.

    Where a generate function makes several samples of one, these are a list within the list. After `abort` the group
    comes back as it is.
    """
    if GenerateState(args).aborted:
        return group
    return await generate_group(SampleContext.of_args(args), group, sampling_params, evaluation)


async def abort(args: Namespace, rollout_id: int) -> list[list[Sample | list[Sample]]]:
    """Stop what a user's rollout function has under way in `GenerateState(args).pendings`, and wait for it.

    Returns the groups with what they have, for the data source, with --partial-rollout; else none. The state stays
    aborted until its `reset`.
    """
    state = GenerateState(args)
    state.aborted = True
    done = await _abort_requests(args, state.pendings)
    state.pendings = set()
    groups = [task.result() for task in done]
    if not args.partial_rollout:
        return []
    for sample in (sample for group in groups for sample in flat_group(group)):
        if sample.response:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


async def _abort_requests(args: Namespace, tasks: Iterable[Task], timeout_s: float = math.inf) -> list[Task]:
    """Let the engines abort requests until the tasks that wait for them are done; return those that are in time."""
    tasks = list(tasks)
    waiting, deadline = set(tasks), time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline:
        # Again and again: a request that was on its way to an engine came after the first call.
        await abort_all(tuple(args.engine_urls), args.api_key)
        _, waiting = await asyncio.wait(waiting, timeout=0.2)
    return [task for task in tasks if task not in waiting]


# ------------------------------------------------------------------------------------------------ a rollout
async def generate_groups(args: Namespace, data_source: DataSource) -> RolloutFnTrainOutput:
    """Generate `args.rollout_batch_size` groups on the running event loop."""
    stopping = asyncio.Event()
    args.is_stopping = stopping.is_set
    async with rollout_client(args) as client, open_teacher(args) as teacher:
        rollout = _Rollout(args, data_source, teacher)
        try:
            await rollout.fill()
        except RolloutAborted:
            rollout.give_back_kept()
            raise
        finally:
            await rollout.end(stopping)
        if teacher is not None:
            await teacher.finish()
    return rollout.output(request_counts(args, client, "rollout"))


def open_teacher(args: Namespace) -> AbstractAsyncContextManager[Teacher | None]:
    """Open the clients of --use-opd's teacher for this event loop; None where the run has no teacher."""
    if not getattr(args, "teacher_urls", ()):
        return nullcontext()
    from fusionrl.rollout.teacher import Teacher

    return Teacher(args)


def apply_filter(path: str | None, args: Namespace, group: list[Sample]) -> DynamicFilterOutput:
    """Ask the dynamic sampling filter `path`, if there is one, about a finished group; a bare bool is accepted.

    Raises HookError if it raised, or returned something else.
    """
    if path is None:
        return DynamicFilterOutput(True)
    verdict = call_hook("dynamic_sampling_filter_path", path, args, group)
    keep_images(group)
    if isinstance(verdict, bool | np.bool_):
        return DynamicFilterOutput(bool(verdict))
    if not hasattr(verdict, "keep"):
        problem = f"it returned {type(verdict).__name__}; a DynamicFilterOutput or a bool is wanted"
        raise HookError(f"--dynamic-sampling-filter-path {path}: {problem}", group)
    fallback = bool(getattr(verdict, "keep_when_insufficient", False))
    return DynamicFilterOutput(bool(verdict.keep), getattr(verdict, "reason", None), fallback)


class GroupFilter:
    """--dynamic-sampling-filter-path over a rollout, or over a run; ends one whose filter keeps next to nothing."""

    def __init__(self, num_wanted: int) -> None:
        """`num_wanted`: groups of a batch."""
        self._num_wanted, self._num_kept = num_wanted, 0
        self.dropped: Counter[str] = Counter()

    def refuses(self, context: SampleContext, group: list[Sample], are_missing: bool = False) -> str:
        """Return why the filter does not keep a finished group, "" if it does.

        are_missing  without this group more prompts would have to be sampled, which some filters avoid

        Raises ValueError, which names the filter and what it said, if it keeps next to nothing.
        """
        verdict = apply_filter(context.filter_path, context.args, group)
        if verdict.keep or (are_missing and verdict.keep_when_insufficient):
            self._num_kept += 1
            return ""
        reason = verdict.reason or "filtered"
        self.dropped[reason] += 1
        num_dropped = self.dropped.total()
        if num_dropped >= MAX_DROPPED * self._num_wanted and self._num_kept * MAX_DROPPED < num_dropped:
            raise ValueError(
                f"--dynamic-sampling-filter-path {context.filter_path}: it kept {self._num_kept} of"
                f" {self._num_kept + num_dropped} groups, {self._num_wanted} are wanted; reasons: {dict(self.dropped)}"
            )
        return reason


class _Rollout:
    """The groups of one rollout: under way, kept and dropped."""

    def __init__(self, args: Namespace, data_source: DataSource, teacher: Teacher | None) -> None:
        self._args, self._source, self._teacher = args, data_source, teacher
        self._context, self._params = SampleContext.of_args(args), sampling_params(args)
        self._num_wanted: int = args.rollout_batch_size
        self._keeps_refused = args.rollout_all_samples_process_path is not None  # that hook sees all finished groups
        self._kept: list[list[Sample]] = []
        self._kept_blank: list[list[Sample]] = []  # the same groups as they came from the data source
        self._refused: list[list[Sample]] = []
        self._filter = GroupFilter(self._num_wanted)
        self._pending: dict[Task, list[Sample]] = {}
        self._num_partial = self._num_unused = 0

    async def fill(self) -> None:
        """Generate until enough groups are kept.

        Raises RolloutAborted if the rollout was stopped before that; ValueError if the filter keeps next to nothing.
        """
        args = self._args
        while len(self._kept) < self._num_wanted:
            if args.abort_event.is_set():
                raise RolloutAborted("the rollout was aborted")
            while len(self._kept) + len(self._pending) < self._num_wanted:
                for group in self._source.get_samples(args.over_sampling_batch_size or args.rollout_batch_size):
                    blank = copy.deepcopy(group)
                    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
                        for sample in (sample for sample in group if sample.response_length):
                            # Train on nothing that was sampled in an earlier rollout, by older weights.
                            sample.loss_mask = np.zeros(sample.response_length, np.int32)
                    self._pending[asyncio.create_task(generate_group(self._context, group, self._params))] = blank
            done, _ = await asyncio.wait(self._pending, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                blank = self._pending.pop(task)
                self._take(flat_group(task.result()), blank)

    def _take(self, group: list[Sample], blank: list[Sample]) -> None:
        are_missing = len(self._kept) + len(self._pending) < self._num_wanted
        if not self._filter.refuses(self._context, group, are_missing):
            self._kept.append(group)
            self._kept_blank.append(blank)
            if self._teacher is not None:
                self._teacher.begin(group)
        elif self._keeps_refused:
            self._refused.append(group)

    def give_back_kept(self) -> None:
        """Hand the prompts of finished groups back: the rollout ends without them, and they come again."""
        self._source.add_samples(self._kept_blank)

    async def end(self, stopping: asyncio.Event) -> None:
        """Stop what still runs; with --partial-rollout samples continue in the next rollout, else they start again."""
        args = self._args
        self._num_unused = len(self._pending)
        if self._pending and args.partial_rollout and len(self._kept) >= self._num_wanted:
            stopping.set()
            await self._stop_and_keep()
        unfinished = list(self._pending.values())
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        if unfinished:
            self._source.add_samples(unfinished)  # their prompts come first in the next rollout
            await abort_all(tuple(args.engine_urls), args.api_key)

    async def _stop_and_keep(self) -> None:
        """Abort what still runs and hand the groups back with what they have.

        Groups of whom the engines do not let go in time are left in `_pending`.
        """
        for task in await _abort_requests(self._args, self._pending, ABORT_TIMEOUT_S):
            blank = self._pending.pop(task)
            # What it raised, a reward function's error say, ends the rollout as at any time.
            group = flat_group(task.result())
            one_each = len(group) == len(blank)  # several samples made of one cannot be continued
            self._source.add_samples([group if one_each else blank])
            if one_each:
                self._num_partial += sum(s.status == Sample.Status.ABORTED and s.response_length > 0 for s in group)

    def output(self, retries: dict[str, float]) -> RolloutFnTrainOutput:
        """Return the wanted groups, in the order of their samples, and the metrics."""
        kept_groups = sorted(self._kept, key=lambda group: group[0].index or 0)
        dropped, surplus = self._filter.dropped, kept_groups[self._num_wanted :]
        if surplus:
            dropped["surplus"] += len(surplus)
        metrics: dict[str, float] = {f"rollout/dropped_{reason}": count for reason, count in dropped.items()}
        if self._num_unused:
            metrics["rollout/unused_groups"] = self._num_unused
        if self._args.partial_rollout:
            metrics["rollout/partial_samples"] = self._num_partial
        refused = [*surplus, *self._refused] if self._keeps_refused else []
        return RolloutFnTrainOutput(kept_groups[: self._num_wanted], metrics | retries, refused)


# ------------------------------------------------------------------------------------------------ an evaluation
_prompts: dict[str, list[Sample]] = {}  # by everything that decides how the prompts of a set are read


async def evaluate_sets(args: Namespace) -> RolloutFnEvalOutput:
    """Evaluate every set of --eval-prompt-data or --eval-config."""
    async with rollout_client(args) as client:
        data = {eval_set.name: await _evaluate_set(args, eval_set) for eval_set in eval_sets(args)}
        return RolloutFnEvalOutput(data, request_counts(args, client, "eval"))


def eval_sampling_params(params: SamplingParams, eval_set: EvalSet) -> SamplingParams:
    """The sampling parameters of a rollout with the settings of an evaluation set."""
    params = params | {
        "temperature": eval_set.temperature,
        "top_p": eval_set.top_p,
        "top_k": eval_set.top_k,
        "max_new_tokens": eval_set.max_response_len,
        "min_new_tokens": eval_set.min_new_tokens,
    }
    for name in ("stop", "stop_token_ids", "repetition_penalty"):
        params.pop(name, None)
        if value := getattr(eval_set, name):
            params[name] = value
    return params


async def _evaluate_set(args: Namespace, eval_set: EvalSet) -> EvalResult:
    """Generate and score all samples of one set; hooks see the set's own reward flags in `args`."""
    set_args = copy.copy(args)
    set_args.rm_type, set_args.custom_rm_path = eval_set.rm_type, eval_set.custom_rm_path
    set_args.eval_reward_key = eval_set.reward_key
    set_args.custom_generate_function_path = eval_set.custom_generate_function_path
    set_args.group_rm = args.group_rm and eval_set.custom_rm_path is not None
    context, params = SampleContext.of_args(set_args), eval_sampling_params(sampling_params(args), eval_set)
    flag = "--eval-prompt-data" if args.eval_config is None else f"--eval-config {args.eval_config}"
    samples: list[Sample] = []
    for group, prompt in enumerate(_prompts_of(args, eval_set, flag)):
        for _ in range(eval_set.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = group, len(samples)
            sample.metadata.update(copy.deepcopy(eval_set.metadata_overrides))
            samples.append(sample)
    groups = [sample.group_index for sample in samples]
    num_siblings = eval_set.n_samples_per_eval_prompt
    results = await asyncio.gather(
        *(generate_and_score(context, s, dict(params), True, i % num_siblings) for i, s in enumerate(samples))
    )
    samples = []
    for index, result in zip(groups, results, strict=True):
        for sample in flat_group([result]):
            sample.group_index = index  # also where a user's function made the sample
            samples.append(sample)
    flag = "--eval-reward-key" if args.eval_config is None else f"{flag}: set {eval_set.name}: reward_key"
    return {  # an answer that was never scored is a wrong one
        "rewards": [0.0 if s.reward is None else reward_value(s.reward, eval_set.reward_key, flag) for s in samples],
        "truncated": [s.status == Sample.Status.TRUNCATED for s in samples],
        "samples": samples,
    }


def _prompts_of(args: Namespace, eval_set: EvalSet, flag: str) -> list[Sample]:
    has_own = eval_set.custom_generate_function_path is not None
    columns = PromptColumns.of(args, has_own).of_set(eval_set, has_own)
    key = repr((args.hf_checkpoint, eval_set.path, columns))
    if key not in _prompts:
        _prompts[key] = load_prompts(eval_set.path, load_tokenizer(args.hf_checkpoint), columns, flag).samples
    return _prompts[key]
