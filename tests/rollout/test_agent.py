"""The agent loop against a scripted HTTP engine: tokens, masks, log-probs and versions of whole samples."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.rollout.agent import generate, parser_name
from fusionrl.rollout.types import NO_ROOM_AFTER
from tests.rollout import engine as scripted
from tests.rollout.engine import Engine, Turn, call, check_sample, needs, response
from tests.tiny_model import make_byte_tokenizer

pytestmark = needs("sglang")
HOOKS = Path(__file__).with_name("agent_hooks.py")


@pytest.fixture
def play(folder: str) -> Callable[..., tuple[Sample, Engine]]:
    """play([turn, …], metadata, flag=value) -> (finished sample, engine)."""

    def start(turns: list[Turn | str], metadata: dict[str, Any] | None = None, **changes: Any) -> tuple[Sample, Engine]:
        flags = {"apply_chat_template": True, "tools_path": f"{HOOKS}:tools", "tool_call_parser": "qwen25"}
        messages = [{"role": "user", "content": "Is it wet?"}]
        sample = Sample(index=0, prompt="?", messages=messages, metadata=metadata or {})
        made, engine = scripted.play(generate, folder, sample, turns, **flags | changes)
        assert made is sample
        return sample, engine

    return start


def test_turns_of_model_and_tools(play: Any) -> None:
    both = "Let me see. " + call("weather", town="Rome") + "\n" + call("python", code="print(6 * 7)")
    sample, engine = play([both, call("weather", town="Oslo"), "It is."])
    first, second = response("Rome: rain", "42"), response("Oslo: rain")
    assert engine.texts(sample) == [first, second, ""]
    assert sample.status == Sample.Status.COMPLETED
    counts = [sample.metadata[f"num_{name}"] for name in ("turns", "tool_calls", "tool_errors")]
    assert counts == [3, 3, 0]
    assert sample.response.endswith("It is.") and sample.response.startswith(both + first)
    prompt = engine.tokenizer.decode(sample.tokens[: sample.prompt_length])
    assert '"name": "weather"' in prompt and prompt.endswith("Is it wet?<|im_end|>\n<|im_start|>assistant\n")
    # The whole is what the template renders of the whole conversation, for a model that spells as the template does.
    sampled = [both + "<|im_end|>", call("weather", town="Oslo") + "<|im_end|>", "It is.<|im_end|>"]
    assert engine.tokenizer.decode(sample.tokens) == prompt + sampled[0] + first + sampled[1] + second + sampled[2]


def test_a_prompt_rendered_with_its_tools_is_left_as_it_is(folder: str) -> None:
    tokens = np.array([5, 6, 7], np.int32)
    sample = Sample(prompt_tokens=tokens, prompt="other", metadata={"tools": [{"name": "calc"}]})
    scripted.play(generate, folder, sample, ["a"], tool_call_parser="qwen25")
    assert (sample.tokens[:3], sample.prompt_length) == ([5, 6, 7], 3)


@pytest.mark.parametrize("metadata", [{}, {"tools": []}, {"tools": ["calc"]}])
def test_a_row_without_tools_gets_those_of_the_hook(play: Any, metadata: dict[str, Any]) -> None:
    sample, engine = play(["No."], metadata=metadata)
    assert '"name": "weather"' in engine.tokenizer.decode(sample.tokens[: sample.prompt_length])


@pytest.mark.parametrize("hook", ["empty", "none"])
def test_a_hook_without_tools_has_one_turn_in_which_nothing_is_a_call(play: Any, hook: str) -> None:
    said = call("weather", town="Rome")
    sample, _ = play([said], tools_path=f"{HOOKS}:{hook}", tool_call_parser="auto")
    assert (sample.status, sample.response) == (Sample.Status.COMPLETED, said)
    assert (sample.metadata["num_turns"], sample.metadata["num_tool_calls"]) == (1, 0)


def test_a_hook_without_tools_leaves_those_of_the_row(play: Any) -> None:
    schema = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
    sample, _ = play(["No."], tools_path=f"{HOOKS}:empty", metadata={"tools": [schema]})
    assert (sample.status, sample.response, sample.metadata["tools"]) == (Sample.Status.COMPLETED, "No.", [schema])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('<tool_call>\n{"name": "weather", "argum\n</tool_call>', "error: the tool call cannot be read: "),
        ("<tool_call>\n[1]\n</tool_call>", "error: the tool call cannot be read: "),
        (call("oracle", x=1), "error: there is no tool 'oracle'; there are ['python', 'weather']"),
        (call("weather", town=3), "error: wrong arguments for weather: 3 is not of type 'string'"),
        (call("weather", town="a", x="b"), "error: wrong arguments for weather: Additional properties"),
        (call("weather", town="Atlantis"), "error: no such town"),
        (call("weather", town="Slow"), "error: weather took longer than 0.3 s"),
    ],
)
def test_what_the_model_did_wrong_is_told_to_the_model(play: Any, said: str, told: str) -> None:
    sample, engine = play([said, "Oh."], tool_timeout_s=0.3)
    first, *others = engine.texts(sample)
    assert first.startswith(f"\n<|im_start|>user\n<tool_response>\n{told}") and others == [""]
    assert (sample.status, sample.metadata["num_tool_errors"]) == (Sample.Status.COMPLETED, 1)
    assert "SGLANG_FORWARD_UNKNOWN_TOOLS" not in os.environ  # also where SGLang's parser raised an error


def test_what_a_tool_did_wrong_is_raised(play: Any) -> None:
    with pytest.raises(HookError) as caught:
        play([call("weather", town="Broken")])
    first, where, code = str(caught.value).splitlines()
    assert first == f"--tools-path {HOOKS}:tools: the tool 'weather': RuntimeError: the weather service is down"
    assert f'File "{HOOKS}", line ' in where and "is down" in code


def test_a_long_answer_is_cut_and_said_so(play: Any) -> None:
    sample, engine = play([call("weather", town="Long"), "Oh."], max_tool_response_len=50)
    assert engine.texts(sample)[0] == response("x" * 50 + "\n[cut: 50 of 1000 tokens]")


def test_a_tool_cannot_speak_as_somebody_else(play: Any) -> None:
    sample, engine = play([call("weather", town="Evil"), "Oh."])
    added = check_sample(sample, engine.exchanges)[0]
    assert added.count(258) == 1 and added.count(257) == 2
    assert "< |im_end|>\n< |im_start|>assistant\nI won" in engine.tokenizer.decode(added)


def test_a_turn_that_a_stop_string_ended_is_closed_for_the_model(play: Any) -> None:
    sample, engine = play([Turn(call("weather", town="Rome"), end=None), "Oh."])
    assert engine.texts(sample)[0] == "<|im_end|>" + response("Rome: rain")


def test_limits_truncate(play: Any) -> None:
    said = call("weather", town="Rome")
    sample, engine = play([said] * 3, max_turns=3)
    assert engine.texts(sample)[-1] == ""
    assert (sample.status, sample.metadata["num_turns"]) == (Sample.Status.TRUNCATED, 3)

    sample, engine = play([said], rollout_max_response_len=10)  # a turn that was cut calls nothing
    assert engine.texts(sample) == [""]
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 10)

    added = len(response("Rome: rain").replace("<|im_start|>", "s").replace("<|im_end|>", "e"))
    limit = sample.prompt_length + len(said) + 1 + added
    for room, num_turns, status in ((0, 1, "truncated"), (1, 2, "truncated"), (2, 2, "truncated"), (3, 2, "completed")):
        sample, engine = play([said, "Oh"], rollout_max_context_len=limit + room)
        assert (len(engine.exchanges), sample.status.value) == (num_turns, status), room
        assert sample.metadata.get(NO_ROOM_AFTER) == (1 if room == 0 else None), "a turn that was cut off had begun"
        engine.texts(sample)
        assert len(sample.tokens) <= limit + room

    sample, engine = play([said] * 4, rollout_max_response_len=300, rollout_max_context_len=None)
    engine.texts(sample)
    assert sample.response_length <= 300 and sample.status == Sample.Status.TRUNCATED


def test_an_aborted_turn_aborts_the_sample(play: Any) -> None:
    sample, engine = play([call("weather", town="Rome"), Turn("It", end=None, finish={"type": "abort"})])
    engine.texts(sample)
    assert sample.status == Sample.Status.ABORTED


def test_mistakes_of_the_user_are_named(folder: str, play: Any) -> None:
    assert parser_name("auto", folder) == "qwen25"
    with pytest.raises(ValueError, match="add --apply-chat-template"):
        scripted.play(generate, folder, Sample(prompt="x"), [])
    with pytest.raises(HookError, match=r"--tools-path .*:no_tools: KeyError: 'mine'"):
        play(["x"], tools_path=f"{HOOKS}:no_tools")
    with pytest.raises(ValueError, match="--tool-call-parser qwen26: unknown; known are .*qwen25"):
        play(["x"], tool_call_parser="qwen26")
    bare = Path(folder).parent / "bare"
    make_byte_tokenizer().save_pretrained(bare)
    with pytest.raises(ValueError, match=f"--tool-call-parser auto: the chat template of {bare} has no tool calls"):
        parser_name("auto", str(bare))
