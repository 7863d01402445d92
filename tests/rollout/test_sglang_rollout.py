"""The default rollout's loop, with a generate function that needs no engine."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.buffer.data_source import RolloutDataSource
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, load_function
from fusionrl.data.sample import Sample
from fusionrl.engines.client import GenerateClient, Generation
from fusionrl.rewards.dispatch import RewardError
from fusionrl.rollout.sglang_rollout import (
    generate,
    generate_rollout,
    generate_turn,
    prompt_tokens,
    sampling_params,
    stream_generate,
)
from fusionrl.rollout.types import NO_ROOM_AFTER, RolloutAborted, RolloutFnTrainOutput
from tests.engines.streaming import Engine, serve

HOOKS = Path(__file__).with_name("rollout_hooks.py")


@pytest.fixture
def state() -> Any:
    """The hooks' own notes, empty at the start of each test."""
    notes = load_function(f"{HOOKS}:generate").__globals__["STATE"]
    notes.reset()
    return notes


@pytest.fixture
def start(tiny_model: Path, write_rows: Callable[..., Path], state: Any) -> Any:
    """start(flag=value, …) -> (args, data source) over 20 prompts `p0` … `p19`."""
    data = write_rows([{"input": f"p{i}", "label": str(i)} for i in range(20)])

    def make(**changes: Any) -> tuple[Any, RolloutDataSource]:
        functions = {"custom_rm_path": f"{HOOKS}:label_parity", "custom_generate_function_path": f"{HOOKS}:generate"}
        sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 4}
        values = {"hf_checkpoint": str(tiny_model), "prompt_data": str(data), "label_key": "label"} | functions | sizes
        run = {"engine_urls": [], "router_url": "http://127.0.0.1:9", "api_key": None, "vocab_size": 512}
        args = Config.from_flat(values | changes).to_args(abort_event=threading.Event(), **run)
        return args, RolloutDataSource(args)

    return make


@pytest.fixture
def evaluate(start: Any) -> Any:
    """evaluate(flag=value, …) -> what an evaluation finds of each set."""

    def run(**changes: Any) -> Any:
        args, source = start(**changes)
        reward = args.custom_rm_path
        found = generate_rollout(args, 0, source, evaluation=True).data
        assert source.offset == 0, "an evaluation takes no training prompts"
        assert args.custom_rm_path == reward, "the flags of the run are as they were"
        return found

    return run


def roll_out(start: Any, rollout_id: int = 0, **flags: Any) -> tuple[RolloutFnTrainOutput, RolloutDataSource]:
    args, source = start(**flags)
    return generate_rollout(args, rollout_id, source), source


def prompts(groups: list[list[Sample]]) -> list[Any]:
    return [group[0].prompt for group in groups]


def test_exactly_the_batch_comes_back(start: Any, state: Any) -> None:
    args, source = start()
    output = generate_rollout(args, 0, source)
    found = [[(s.index, s.prompt, s.reward) for s in group] for group in output.samples]
    assert found == [[(2 * i, f"p{i}", i % 2), (2 * i + 1, f"p{i}", i % 2)] for i in range(4)]
    assert (state.started, output.metrics, source.buffer) == (8, {}, [])
    assert prompts(generate_rollout(args, 1, source).samples) == ["p4", "p5", "p6", "p7"]


@pytest.mark.parametrize(("name", "reason"), [("only_odd", "even"), ("bare_bool", "filtered")])
def test_dropped_groups_are_counted_replaced_and_shown(start: Any, name: str, reason: str) -> None:
    """The hook that sees all gets refused and surplus groups, as slime's; without it they are dropped."""
    flags = {"dynamic_sampling_filter_path": f"{HOOKS}:{name}"}
    output, source = roll_out(start, **flags, rollout_all_samples_process_path=f"{HOOKS}:only_odd")
    assert [int(group[0].label) % 2 for group in output.samples] == [1] * 4
    even = output.metrics[f"rollout/dropped_{reason}"]
    assert even >= 4
    # Every prompt that was taken is in the batch, counted as dropped, or handed back.
    surplus = output.metrics.get("rollout/dropped_surplus", 0)
    assert source.offset == 4 + even + surplus + sum(len(group) for group in source.buffer) / 2
    assert len(output.refused) == even + surplus
    assert all(sample.reward is not None and sample.response for group in output.refused for sample in group)
    assert sum(int(group[0].label) % 2 == 0 for group in output.refused) == even
    assert roll_out(start, **flags)[0].refused == []


def test_a_filter_may_keep_what_would_else_have_to_be_replaced(start: Any, state: Any) -> None:
    flags = {"dynamic_sampling_filter_path": f"{HOOKS}:odd_while_there_are", "over_sampling_batch_size": 6}
    output, source = roll_out(start, **flags)
    assert len(output.samples) == 4 and source.offset == 6, "nothing more was sampled"
    odd = sum(int(group[0].label) % 2 for group in output.samples)
    assert odd == 3 and output.metrics["rollout/dropped_even"] == 2


def test_what_was_begun_and_not_needed_is_served_first_next_time(start: Any, state: Any) -> None:
    state.slow = {f"p{i}" for i in range(0, 6)}  # the first six prompts hang; the others are quick
    output, source = roll_out(start, over_sampling_batch_size=10)
    assert prompts(output.samples) == ["p6", "p7", "p8", "p9"]
    assert prompts(source.buffer) == [f"p{i}" for i in range(6)]
    blank = source.buffer[0][0]
    assert (blank.response_length, len(blank.tokens), blank.reward) == (0, 0, None)
    assert blank.status == Sample.Status.PENDING and "half" not in blank.metadata
    state.slow = set()
    args, _ = start()
    assert prompts(generate_rollout(args, 1, source).samples) == ["p0", "p1", "p2", "p3"]
    assert prompts(source.buffer) == ["p4", "p5"]


@pytest.mark.timed
def test_abort_ends_the_rollout_within_a_second_and_loses_no_prompt(start: Any, state: Any) -> None:
    tries: list[float] = []
    while len(tries) < 3 and min(tries, default=9.0) > 0.3 + 1.0:  # a busy machine may hold one up
        args, source = start()
        state.slow = {"p1", "p2"}  # p0 and p3 finish, then nothing goes on
        timer = threading.Timer(0.3, args.abort_event.set)
        timer.start()
        begin = time.perf_counter()
        with pytest.raises(RolloutAborted):
            generate_rollout(args, 0, source)
        tries.append(time.perf_counter() - begin)
    assert min(tries) < 0.3 + 1.0, tries
    assert sorted(prompts(source.buffer)) == ["p0", "p1", "p2", "p3"]
    assert all(s.response_length == 0 and s.reward is None for group in source.buffer for s in group)


def test_no_more_requests_at_a_time_than_allowed(start: Any, state: Any) -> None:
    for num_engines, concurrency, most in ((1, 3, 3), (2, 2, 4)):
        state.reset()
        state.pause_s = 0.01
        args, source = start(sglang_server_concurrency=concurrency)
        args.engine_urls = ["http://127.0.0.1:9"] * num_engines  # the bound is that of each engine
        generate_rollout(args, 0, source)
        assert state.most_running == most


def test_a_reward_that_raises_ends_the_rollout(start: Any) -> None:
    with pytest.raises(RewardError, match=r"raises_at_p2: ZeroDivisionError: .* at sample [45]"):
        roll_out(start, custom_rm_path=f"{HOOKS}:raises_at_p2")


def test_generate_functions_of_other_kinds(start: Any) -> None:
    for name in ("makes_new_samples", "synchronous"):
        output, _ = roll_out(start, custom_generate_function_path=f"{HOOKS}:{name}")
        assert [[s.reward for s in group] for group in output.samples] == [[0, 0], [1, 1]] * 2
    output, _ = roll_out(start, custom_generate_function_path=f"{HOOKS}:two_for_one")
    assert [len(group) for group in output.samples] == [4] * 4
    args, source = start()
    source.prompts[0].generate_function_path = f"{HOOKS}:rewards_itself"  # a sample names its own function
    first, second, *_ = generate_rollout(args, 0, source).samples
    assert [s.reward for s in (*first, *second)] == [0.125, 0.125, 1.0, 1.0]


def test_a_group_is_scored_in_one_call(start: Any, state: Any) -> None:
    output, _ = roll_out(start, group_rm=True, custom_rm_path=f"{HOOKS}:group_rank")
    assert [[(s.reward, s.metadata["scored"]) for s in group] for group in output.samples] == [[(0, 1), (1, 1)]] * 4


def test_a_greedy_answer_is_each_groups_baseline(start: Any, state: Any) -> None:
    """--advantage-estimator remax: one more answer a prompt, at temperature 0, scored and not trained on."""
    flags = {"advantage_estimator": "remax", "overlong_buffer_len": 4}
    output, _ = roll_out(start, custom_generate_function_path=f"{HOOKS}:says_its_temperature", **flags)
    assert [len(group) for group in output.samples] == [2] * 4 and state.temperatures == {0.0, 1.0}
    for number, group in enumerate(output.samples):
        found = [(s.response, s.reward, s.baseline_reward) for s in group]
        assert found == [("1.0", number % 2, number % 2 - 0.5)] * 2, "two of the four tokens of the penalty"
    assert state.started == 12


@pytest.mark.parametrize(
    ("generates", "scores"),
    [("fails_greedily", "label_parity"), ("says_its_temperature", "dies_at_the_greedy_answer_to_p1")],
)
def test_a_greedy_answer_without_a_reward_fails_its_group(start: Any, generates: str, scores: str) -> None:
    functions = {"custom_generate_function_path": f"{HOOKS}:{generates}", "custom_rm_path": f"{HOOKS}:{scores}"}
    for value, status in ((None, "failed"), (0.25, "completed")):
        output, _ = roll_out(start, advantage_estimator="remax", reward_failure_value=value, **functions)
        groups = {group[0].prompt: group for group in output.samples}
        found = [(s.status.value, s.baseline_reward) for s in groups.pop("p1")]
        assert found == [(status, value)] * 2, "a 0 would be trained on"
        for sample in (sample for group in groups.values() for sample in group):
            assert sample.status == Sample.Status.COMPLETED and sample.baseline_reward is not None


# ------------------------------------------------------------------------------------------------ evaluation
def test_evaluation(evaluate: Any, write_rows: Callable[..., Path], state: Any) -> None:
    small = write_rows([{"input": f"e{i}", "label": str(i)} for i in range(3)], "small.jsonl")
    flags = {"eval_prompt_data": ["a", str(small), "b", str(small)], "n_samples_per_eval_prompt": 2}
    found = evaluate(**flags, eval_temperature=0.0, apply_chat_template_kwargs={"nested": {"x": [1]}})
    assert found["a"]["rewards"] == [0, 0, 1, 1, 0, 0]
    assert found["a"]["truncated"] == [False] * 6
    assert [s.group_index for s in found["b"]["samples"]] == [0, 0, 1, 1, 2, 2]
    assert (state.temperatures, state.evaluations) == ({0.0}, {True})


def test_evaluation_reports_the_samples_that_the_function_made(evaluate: Any, write_rows: Callable[..., Path]) -> None:
    small = write_rows([{"input": "e", "label": "1"}], "small.jsonl")
    for name in ("makes_new_samples", "makes_bare_samples"):
        function = f"{HOOKS}:{name}"
        found = evaluate(eval_prompt_data=["a", str(small)], custom_generate_function_path=function)["a"]
        assert found["rewards"] == [1.0]
        assert [s.group_index for s in found["samples"]] == [0], "pass@k needs to know whose prompt it is"


def test_the_key_of_a_reward_with_several_parts(evaluate: Any, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    small = write_rows([{"input": "e", "label": "1"}], "small.jsonl")
    flags = {"eval_prompt_data": ["a", str(small)], "custom_rm_path": f"{HOOKS}:several"}
    assert evaluate(**flags, reward_key="x", eval_reward_key="y")["a"]["rewards"] == [2.0]
    config = tmp_path / "sets.yaml"
    config.write_text(f'datasets: {{a: {{path: {small}, custom_rm_path: "{HOOKS}:several", reward_key: z}}}}')
    for more, message in (
        (flags, r"\['x', 'y'\]; choose one with --eval-reward-key"),
        ({"eval_config": str(config)}, r"--eval-config .*: set a: reward_key z: the reward has only the keys"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(**more)


def test_evaluation_by_a_file_with_settings_for_each_set(
    evaluate: Any, write_rows: Callable[..., Path], state: Any, tmp_path: Path
) -> None:
    small = write_rows([{"question": f"e{i}", "answer": "ok" if i else "no"} for i in range(2)], "small.jsonl")
    config = tmp_path / "sets.yaml"
    config.write_text(
        f"""
        eval:
          defaults: {{path: {small}, input_key: question, label_key: answer, temperature: 0.5}}
          datasets:
            greedy: {{rm_type: exact, temperature: 0, stop: ["#"], metadata_overrides: {{level: 3}}}}
            many: {{n_samples_per_eval_prompt: 3, max_response_len: 7, top_p: 0.9, repetition_penalty: 1.1,
                   custom_rm_path: "{HOOKS}:several", reward_key: y}}
            own: {{custom_generate_function_path: "{HOOKS}:rewards_itself"}}
        """,
        encoding="utf-8",
    )
    found = evaluate(eval_config=str(config), rollout_stop=["\n"], custom_rm_path=f"{HOOKS}:raises_at_p2")
    rewards = {"greedy": [0.0, 1.0], "many": [2.0] * 6, "own": [0.125] * 2}  # the hook answers "ok"
    assert {name: one["rewards"] for name, one in found.items()} == rewards
    assert [s.group_index for s in found["many"]["samples"]] == [0, 0, 0, 1, 1, 1]
    assert [s.metadata.get("level") for s in found["greedy"]["samples"]] == [3, 3]
    assert found["many"]["samples"][0].metadata.get("level") is None
    names = ("temperature", "stop", "max_new_tokens", "top_p", "repetition_penalty")
    first, last = ([params.get(name) for name in names] for params in (state.params[0], state.params[-1]))
    assert (first, last) == ([0.0, ["#"], 4, 1.0, None], [0.5, ["\n"], 7, 0.9, 1.1])


def test_a_built_in_reward_beside_a_groups_reward(
    evaluate: Any, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    small = write_rows([{"input": "e", "label": "ok"}], "small.jsonl")
    config = tmp_path / "sets.yaml"
    config.write_text(f"datasets: {{a: {{path: {small}, rm_type: exact}}, b: {{path: {small}}}}}")
    found = evaluate(eval_config=str(config), group_rm=True, custom_rm_path=f"{HOOKS}:group_rank")
    assert (found["a"]["rewards"], found["b"]["rewards"]) == ([1.0], [0.0])


# ------------------------------------------------------------------------------------------------ one request
class Client:
    """Answers as an engine would, and notes what it was asked."""

    def __init__(self, **changes: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self.changes = changes

    async def generate(self, payload: dict[str, Any], routing_key: str | None = None) -> Generation:
        self.asked.append(payload)
        values: dict[str, Any] = {"text": "xyz", "finish_reason": "stop", "weight_versions": [(3, 2), (4, 1)]}
        values |= {"tokens": np.array([7, 8, 9], np.int32), "log_probs": np.array([-1, -2, -3], np.float32)}
        values |= {"prompt_tokens": 2, "cached_tokens": 0, "meta_info": {}}
        return Generation(**(values | self.changes))


def generated(args: Any, sample: Sample, **answer: Any) -> tuple[Any, Client]:
    args.generate_client = client = Client(**answer)
    return asyncio.run(generate(args, sample, sampling_params(args))), client


def test_tokens_in_tokens_out(start: Any, tokenizer: Any) -> None:
    args, source = start(rollout_stop=["#"], rollout_temperature=0.7)
    sample, client = generated(args, source.get_samples(1)[0][0])
    (asked,) = client.asked
    assert asked["input_ids"] == tokenizer.encode("p0") and asked["return_logprob"]
    params = asked["sampling_params"]
    assert (params["temperature"], params["stop"], params["max_new_tokens"]) == (0.7, ["#"], 4)
    assert list(sample.tokens) == [*tokenizer.encode("p0"), 7, 8, 9]
    assert list(sample.weight_versions) == [3, 3, 4]
    assert list(sample.rollout_log_probs) == [-1, -2, -3]
    assert (sample.status, sample.response) == (Sample.Status.COMPLETED, "xyz")


@pytest.mark.parametrize("num_tool_tokens", [0, 2])
def test_a_second_turn_without_room_is_noted(num_tool_tokens: int, start: Any) -> None:
    """The engine answers with three tokens, and the rest is taken by a tool."""
    args, source = start(rollout_max_response_len=3 + num_tool_tokens)
    args.generate_client = client = Client()
    sample = source.get_samples(1)[0][0]
    sample.tokens = prompt_tokens(args, sample)

    async def two_turns() -> Any:
        await generate_turn(args, sample, sampling_params(args))
        sample.append_response_tokens(args, tokens=[7] * num_tool_tokens, trainable=False)
        return await generate_turn(args, sample, sampling_params(args))

    assert asyncio.run(two_turns()) is None and len(client.asked) == 1
    assert sample.metadata[NO_ROOM_AFTER] == 1 and sample.status == Sample.Status.TRUNCATED
    plain, _ = generated(args, source.get_samples(1)[0][0])
    generated(args, plain)  # goes on with its only turn, as a partial rollout does
    assert NO_ROOM_AFTER not in plain.metadata


def test_the_context_limit_shortens_or_spares_the_request(start: Any) -> None:
    for limit, limits_of_requests in ((4, [2]), (2, [])):
        args, source = start(rollout_max_context_len=limit)
        sample, client = generated(args, source.get_samples(1)[0][0])
        assert [asked["sampling_params"]["max_new_tokens"] for asked in client.asked] == limits_of_requests
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 0)
    sample.validate()


@pytest.mark.parametrize("mask", [False, True])
def test_what_is_unfinished_is_kept_and_gone_on_with(start: Any, state: Any, mask: bool) -> None:
    flags = {"custom_generate_function_path": f"{HOOKS}:stepwise", "mask_offpolicy_in_partial_rollout": mask}
    args, source = start(over_sampling_batch_size=8, partial_rollout=True, **flags)
    state.slow, state.version = {"p1", "p4"}, 3
    first = generate_rollout(args, 0, source)
    assert len(first.samples) == 4
    assert all(s.status == Sample.Status.COMPLETED for group in first.samples for s in group)
    kept = {group[0].prompt: group for group in source.buffer}
    begun = {name: [sample.response_length for sample in kept[name]] for name in ("p1", "p4")}
    assert all(0 < length < 10 for lengths in begun.values() for length in lengths)
    partial = sum(s.status == Sample.Status.ABORTED and s.response_length > 0 for g in kept.values() for s in g)
    assert first.metrics["rollout/partial_samples"] == partial >= 4
    source.load_state_dict(json.loads(json.dumps(source.state_dict())))  # a checkpoint holds them, too

    state.slow, state.version = set(), 4
    second = {group[0].prompt: group for group in generate_rollout(args, 1, source).samples}
    for name, lengths in begun.items():
        for sample, before in zip(second[name], lengths, strict=True):
            sample.validate()
            assert list(sample.tokens) == [1, 2, *range(10, 20)]
            assert list(sample.rollout_log_probs) == [-0.5 - i for i in range(10)]
            assert list(sample.weight_versions) == [3] * before + [4] * (10 - before)
            assert list(sample.loss_mask) == [int(not mask)] * before + [1] * (10 - before)
            found = (sample.status, sample.response, sample.reward)
            assert found == (Sample.Status.COMPLETED, "0123456789", int(sample.label) % 2)


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_a_group_is_scored_when_all_of_it_is_finished(start: Any, state: Any, estimator: str) -> None:
    """--group-rm with --partial-rollout: no reward is of a text that an abort cut off."""
    functions = {"generate_function": "second_of_p1_is_slow", "rm": "group_lengths"}
    paths = {f"custom_{kind}_path": f"{HOOKS}:{name}" for kind, name in functions.items()}
    flags = {"group_rm": True, "partial_rollout": True, "advantage_estimator": estimator}
    args, source = start(over_sampling_batch_size=8, **paths, **flags)
    state.slow = {"p1"}
    generate_rollout(args, 0, source)
    (begun,) = [group for group in source.buffer if group[0].prompt == "p1"]
    found = [(s.status.value, s.reward, s.baseline_reward) for s in begun]
    assert found == [("completed", None, None), ("aborted", None, None)]
    state.slow = set()
    second = {group[0].prompt: group for group in generate_rollout(args, 1, source).samples}
    baseline = 10.0 if estimator == "remax" else None
    assert [(s.reward, s.baseline_reward) for s in second["p1"]] == [(2.0, baseline), (10.0, baseline)]


def test_a_finished_sibling_of_an_aborted_sample_is_not_made_again(start: Any, state: Any) -> None:
    args, source = start(custom_generate_function_path=f"{HOOKS}:stepwise", partial_rollout=True)
    (group,) = source.get_samples(1)
    group[0].status, group[0].reward, group[0].tokens = Sample.Status.COMPLETED, 0.25, [1, 2, 3]
    group[0].response_length, group[0].loss_mask = 1, [1]
    group[1].status = Sample.Status.ABORTED
    source.add_samples([group])
    done = generate_rollout(args, 0, source).samples[0]
    assert ([sample.reward for sample in done], state.started) == ([0.25, 0.0], 7)


def test_the_default_generation_goes_on_behind_what_is_there(start: Any) -> None:
    args, _ = start(partial_rollout=True)
    sample = Sample(index=0, tokens=[1, 2, 3], response="ab", response_length=1, status=Sample.Status.ABORTED)
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [1], [-2.0], [2]
    done, client = generated(args, sample, text="c", finish_reason="length")
    (asked,) = client.asked
    assert (asked["input_ids"], asked["sampling_params"]["max_new_tokens"]) == ([1, 2, 3], 3)
    assert list(done.tokens) == [1, 2, 3, 7, 8, 9] and list(done.weight_versions) == [2, 3, 3, 4]
    assert done.response == "abc"
    args.is_stopping = lambda: True
    waiting, client = generated(args, Sample(index=1, prompt="p"))
    assert waiting.status == Sample.Status.ABORTED and client.asked == []


@pytest.mark.parametrize(
    ("field", "name", "message", "num_samples"),
    [
        ("custom_generate_function_path", "mask_too_long", r"sample \d: loss_mask has 3 values for 2 response", 1),
        ("custom_generate_function_path", "a_string", "it returned a str where a Sample is wanted", 0),
        ("custom_generate_function_path", "breaks", "KeyError: 'mine'", 1),
        ("rollout_sample_hook_path", "breaks", "KeyError: 'mine'", 1),
        ("rollout_sample_hook_path", "a_string", "unexpected keyword", 1),
        ("dynamic_sampling_filter_path", "breaks_at_once", "KeyError: 'mine'", 2),
        ("dynamic_sampling_filter_path", "returns_nothing", "it returned NoneType; a DynamicFilterOutput", 2),
    ],
)
def test_what_a_hook_did_wrong_is_said_with_its_name(
    start: Any, field: str, name: str, message: str, num_samples: int
) -> None:
    path = f"{HOOKS}:{name}"
    with pytest.raises(HookError, match=message) as caught:
        roll_out(start, **{field: [path] if field == "rollout_sample_hook_path" else path})
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"--{field.replace('_', '-')} {path}: ")
    if "KeyError" in message:
        assert lines[0].startswith(f'  File "{HOOKS}", line ') and lines[1:] == ['    raise KeyError("mine")']
    assert len(caught.value.samples) == num_samples


def test_hooks_see_each_sample_before_it_is_scored(start: Any) -> None:
    output, _ = roll_out(start, 6, rollout_sample_hook_path=[f"{HOOKS}:note_the_rollout", f"{HOOKS}:replace"])
    for sample in (sample for group in output.samples for sample in group):
        assert (sample.metadata["seen"], sample.response) == ((6, False, None), "ok hooked")
        assert sample.reward is not None


async def ask(function: str, args: Any, sample: Sample) -> Sample:
    """The sample, made by `generate` or piece by piece by `stream_generate`."""
    if function == "generate":
        return await generate(args, sample, sampling_params(args))
    before, seen = sample.response_length, 0
    async for piece in stream_generate(args, sample, sampling_params(args)):
        seen += len(piece.tokens)
        assert sample.response_length == before + seen and sample.status != Sample.Status.PENDING
    return sample


@pytest.mark.parametrize("function", ["generate", "stream_generate"])
def test_a_sample_of_two_engines(function: str, start: Any, tokenizer: Any) -> None:
    """The first engine dies within a character: every token is there once, and the text is whole."""
    text = "aé€z"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == 7
    args, _ = start(rollout_max_response_len=7, stream_responses=True)
    served = Engine(tokens, 2, [("die", 2)])

    async def use(url: str) -> Sample:
        sample = Sample(prompt_tokens=np.array([1, 2], np.int32), session_id="session")
        async with GenerateClient(url, stream_responses=True) as args.generate_client:
            return await ask(function, args, sample)

    sample: Any = serve(served, use)
    assert list(sample.tokens) == [1, 2, *tokens] and sample.response == text
    assert list(sample.rollout_log_probs) == [served.log_prob(i) for i in range(7)]
    assert list(sample.weight_versions) == [7] * 7
    assert sample.status == Sample.Status.TRUNCATED
    assert (args.generate_client.num_tokens_kept, served.keys) == (2, ["session", "session"])


@pytest.mark.parametrize("function", ["generate", "stream_generate"])
def test_tokens_of_a_hook_are_kept_and_an_empty_prompt_is_told(function: str, start: Any) -> None:
    args, _ = start(rollout_max_response_len=4)
    served = Engine([97, 98, 99, 100], 3)

    async def use(url: str) -> Sample:
        async with GenerateClient(url) as args.generate_client:
            for ids in (None, np.zeros(0, np.int32)):
                said = r"sample 3: its prompt '' has no tokens \(label '9'\); give its row of the prompt data a text"
                with pytest.raises(ValueError, match=said):
                    await ask(function, args, Sample(index=3, label="9", prompt_tokens=ids))
            return await ask(function, args, Sample(tokens=[1, 2, 3], prompt_tokens=np.array([1, 2], np.int32)))

    sample = serve(served, use)
    assert sample.tokens == [1, 2, 3, 97, 98, 99, 100]
    assert len(served.asked) == 1, "an engine that is asked to go on from nothing dies"


def test_leaving_a_stream_keeps_what_came(start: Any) -> None:
    args, _ = start(rollout_max_response_len=4, rollout_max_context_len=6)
    served = Engine([97, 98, 99, 100], 2)

    async def use(url: str) -> list[Sample]:
        samples = [Sample(prompt_tokens=np.array([1] * count, np.int32)) for count in (2, 6)]
        async with GenerateClient(url) as args.generate_client:
            async with aclosing(stream_generate(args, samples[0], sampling_params(args))) as pieces:
                async for _ in pieces:
                    if samples[0].response == "ab":
                        break
            async for _ in stream_generate(args, samples[1], sampling_params(args)):
                raise AssertionError("there is no room for a token")
        return samples

    left, full = serve(served, use)
    assert (left.response, left.status, left.response_length) == ("ab", Sample.Status.COMPLETED, 2)
    left.validate()
    assert (full.response_length, full.status) == (0, Sample.Status.TRUNCATED)
    assert len(served.asked) == 1


def test_retries_are_counted_with_fault_tolerance(start: Any) -> None:
    args, source = start(
        custom_generate_function_path=None, use_fault_tolerance=True, stream_responses=True, n_samples_per_prompt=1
    )
    served = Engine([97, 98, 99, 100], 0, [("die", 3), ("status", 503)])
    served.num_prompt = 2  # "p0", a byte a token

    async def use(url: str) -> Any:
        args.router_url = url
        return await asyncio.to_thread(generate_rollout, args, 0, source)

    output = serve(served, use)
    assert [group[0].response_length for group in output.samples] == [4] * 4
    assert output.metrics == {"rollout/requests_retried": 2, "rollout/tokens_kept": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_experts_of_the_engine_come_with_the_sample(start: Any, stream: bool) -> None:
    """[tokens - 1, layers, experts of a token] of the whole sequence, asked of the engine past the router."""
    args, source = start(custom_generate_function_path=None, stream_responses=stream, n_samples_per_prompt=1)
    args.routed_experts_size, args.router_url = (3, 2), "http://127.0.0.1:9"
    chosen = np.arange(5 * 3 * 2, dtype=np.int32)  # a prompt of two tokens and four more, but the last
    served = Engine([97, 98, 99, 100], 2, routed_experts=chosen.tobytes())

    async def use(url: str) -> Any:
        args.engine_urls = [url]
        return await asyncio.to_thread(generate_rollout, args, 0, source)

    for group in serve(served, use).samples:
        group[0].validate()
        assert np.array_equal(group[0].rollout_routed_experts, chosen.reshape(5, 3, 2))
    for sent, message in (
        (chosen[:-1].tobytes(), r"routed_experts has 116 bytes, not int32 for \(5, 3, 2\)"),
        (None, "--use-rollout-routing-replay: .*routed_experts is None, not base64"),
    ):
        served.routed_experts = sent
        with pytest.raises(RuntimeError, match=message):
            serve(served, use)
