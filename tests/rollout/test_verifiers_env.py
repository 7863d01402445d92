"""Environments of `verifiers` by our engines: tokens, masks, log-probs, versions and the rubric's score."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import load_prompts
from fusionrl.data.sample import Sample
from plugins.rewards.rubric import reward
from tests.rollout import engine as scripted
from tests.rollout.engine import Engine, Turn, call, check_sample, needs, response

pytest.importorskip("verifiers", reason="needs the package verifiers: scripts/setup-env.sh examples")
ENVS = Path(__file__).with_name("verifiers_envs.py")
OWN = "verifiers.ReasoningGymEnv"
OWN_ARGS = {"gym": "chain_sum", "num_train_examples": 8, "num_eval_examples": 2}


def make_sample(name: str, env_args: dict[str, Any] | None = None, number: int = 0) -> Sample:
    from tools.make_verifiers_data import make_rows

    env = name if "." in name else f"{ENVS}:{name}"
    row = make_rows(env, env_args or {}, "train", -1)[number]
    return Sample(index=number, messages=row["prompt"], label=row["label"], metadata=row["metadata"])


@pytest.fixture
def play(folder: str) -> Callable[..., tuple[Any, Engine]]:
    """play(environment, {argument: value}, [turn, …], flag=value) -> (what generate returned, engine)."""
    from plugins.agents.verifiers_env import generate

    def start(name: str, env_args: dict[str, Any], turns: list[Turn | str], **changes: Any) -> tuple[Any, Engine]:
        flags = {"apply_chat_template": True, "tool_call_parser": "qwen25"}
        return scripted.play(generate, folder, make_sample(name, env_args), turns, **flags | changes)

    return start


def said(*messages: str) -> str:
    turns = "".join(f"<|im_start|>user\n{message}<|im_end|>\n" for message in messages)
    return f"\n{turns}<|im_start|>assistant\n"


def score(sample: Sample) -> float:
    return asyncio.run(reward(None, sample))


def test_an_environment_of_the_package_scores_a_single_turn(play: Any) -> None:
    """reasoning-gym's sums are generated and graded on the spot."""
    sample = make_sample(OWN, OWN_ARGS)
    expression = sample.messages[-1]["content"].split(":")[-1].strip(" =")  # type: ignore[index]
    total, sign = 0, 1
    for part in expression.split():
        sign, total = (1 if part == "+" else -1, total) if part in "+-" else (sign, total + sign * int(part))
    right, engine = play(OWN, OWN_ARGS, [f"<answer>{total}</answer>"])
    assert engine.texts(right) == [""]
    assert (score(right), right.status) == (1.0, Sample.Status.COMPLETED)
    prompt = engine.tokenizer.decode(right.tokens[: right.prompt_length])
    assert prompt.startswith("<|im_start|>system\nGiven a problem") and expression in prompt


def test_turns_of_the_environment(play: Any) -> None:
    sample, engine = play("hotter", {}, ["12", "345", "7"])
    assert engine.texts(sample) == [said("No. 2 letters.< |im_end|>"), said("No. 3 letters.< |im_end|>"), ""]
    # The last guess ends the rollout by the environment's max_turns, before it is answered.
    assert sample.metadata["rubric"] == {"guessed": 1.0, "guesses": 2.0, "num_turns": 3.0, "reward": 1.5}
    assert (sample.metadata["stop_condition"], sample.metadata["num_turns"]) == ("max_turns_reached", 3)
    assert (score(sample), sample.status) == (1.5, Sample.Status.COMPLETED)


def test_limits_truncate_and_the_sample_is_scored(play: Any) -> None:
    sample, engine = play("hotter", {"max_turns": 2}, ["12345678", "7"], rollout_max_response_len=4)
    assert engine.texts(sample) == ["<|im_end|>" + said("No. 4 letters.< |im_end|>"), ""]
    assert (sample.status, score(sample)) == (Sample.Status.TRUNCATED, 1.25)
    sample, engine = play("hotter", {}, ["12"], rollout_max_context_len=60)
    assert engine.texts(sample) == [""]
    assert (sample.status, sample.metadata["stop_condition"]) == (Sample.Status.TRUNCATED, "prompt_too_long")
    assert score(sample) == 0.25


@needs("sglang")
def test_tools_of_the_environment(play: Any) -> None:
    both = "Let me see. " + call("weather", town="Rome") + "\n" + call("weather", town="Atlantis")
    sample, engine = play("tools", {}, [both, call("weather"), call("nothing"), "So much rain."])
    told = engine.texts(sample)
    assert told[0] == response("Rome: rain", "'no such town'")
    assert "missing 1 required positional argument: 'town'" in told[1] and "'nothing'" in told[2]
    assert told[3:] == [""]
    rubric = sample.metadata["rubric"]
    assert (rubric["reward"], rubric["total_tool_calls"], rubric["weather_calls"]) == (1.0, 4.0, 3.0)
    prompt = engine.tokenizer.decode(sample.tokens[: sample.prompt_length])
    assert '"name": "weather"' in prompt and '"town"' in prompt and "The weather of a town." in prompt
    # A call that cannot be read is text, and text ends an environment of tools.
    sample, engine = play("tools", {}, ["<tool_call>\n{rain\n</tool_call>"])
    assert engine.texts(sample) == [""]
    assert (score(sample), sample.metadata["rubric"]["total_tool_calls"]) == (1.0, 0.0)


def test_another_history_is_another_sample(play: Any) -> None:
    made, engine = play("forgetful", {}, ["one", "two"])
    assert [one.response for one in made] == ["one", "two"]
    for one, exchange, prompt in zip(made, engine.exchanges, ("Turn 0", "Turn 1"), strict=True):
        assert check_sample(one, [exchange]) == [[]]
        told = engine.tokenizer.decode(one.tokens[: one.prompt_length])
        assert told == f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        assert score(one) == 1.0


def test_errors_of_the_environment_and_aborts(play: Any) -> None:
    failed, engine = play("broken", {"own": True}, ["1"])
    assert engine.texts(failed) == [""]
    assert (failed.status, "rubric" in failed.metadata) == (Sample.Status.FAILED, False)
    assert "the sandbox is gone" in failed.metadata["verifiers_error"]
    with pytest.raises(RuntimeError, match="the environment has a mistake"):
        play("broken", {"own": False}, ["1"])
    aborted, engine = play("hotter", {}, ["1", Turn("2", end=None, finish={"type": "abort"})])
    assert (aborted.status, "rubric" in aborted.metadata) == (Sample.Status.ABORTED, False)
    engine.texts(aborted)


def test_sampling_arguments_of_the_environment(play: Any) -> None:
    _, engine = play("picky", {"asks": {"stop": "x", "max_tokens": 7, "n": 1, "extra_body": {}}}, ["a"])
    asked = engine.exchanges[0].asked["sampling_params"]
    assert (asked["stop"], asked["max_new_tokens"]) == (["x"], 7)
    with pytest.raises(ValueError, match=r"arguments of its own \({'temperature': 0.1}\).*--rollout-temperature"):
        play("picky", {"asks": {"temperature": 0.1}}, ["a"])


def test_mistakes_of_the_user_are_named(folder: str) -> None:
    from plugins.agents.verifiers_env import as_chat, generate, load_env

    args = Config.from_flat({"hf_checkpoint": folder, "rollout_max_response_len": 9}).to_args()
    for sample, message in (
        (Sample(messages=[]), "write --prompt-data with tools/make_verifiers_data.py"),
        (Sample(metadata={"verifiers": {"env": "x", "input": {}}}), "add --apply-chat-template"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(generate(args, sample, {}))
    for name, message in (
        ("no-such-environment", "'no-such-environment' with {} cannot be made: .*Could not import"),
        (f"{ENVS}:nothing", "has no 'nothing'"),
        (f"{ENVS}:data", "made Dataset"),
        (f"{ENVS}:grouped", "has functions of a whole group"),
    ):
        with pytest.raises(ValueError, match=message):
            load_env(name, "{}")
    with pytest.raises(ValueError, match="plugins.agents.verifiers_env.generate"):
        score(Sample())
    with pytest.raises(ValueError, match=r"holds \['image_url'\]; only text"):
        as_chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]})


def test_an_environment_loads_in_a_thread_and_takes_no_signals() -> None:
    """Rollouts run in a thread of the Buffer, and signals belong to Ray's worker."""
    from plugins.agents.verifiers_env import load_env

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(load_env, f"{ENVS}:hotter", '{"max_turns": 9}').result().max_turns == 9
    load_env(f"{ENVS}:hotter", '{"max_turns": 10}')
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_tool_writes_what_prompt_data_reads(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import make_verifiers_data

    command = ["--out", str(tmp_path / "data"), "--env", OWN, "--env-args", json.dumps(OWN_ARGS), "--train-size", "3"]
    monkeypatch.setattr(sys, "argv", ["make_verifiers_data.py", *command])
    make_verifiers_data.main()
    assert "train 3, eval 2" in capsys.readouterr().out
    columns = PromptColumns("prompt", label_key="label", apply_chat_template=True)
    samples = load_prompts(str(tmp_path / "data" / "train.jsonl"), tokenizer, columns).samples
    assert [sample.label for sample in samples] == ["0", "1", "2"]
    assert samples[2].metadata["verifiers"]["input"]["answer"] == "2"
    with pytest.raises(ValueError, match="its column 'picture' cannot be written as JSON"):
        make_sample("unwritable")
