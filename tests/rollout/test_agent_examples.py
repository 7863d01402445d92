"""The agents of plugins/agents against a scripted HTTP engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.config.hooks import check_hook, load_function
from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.sglang_rollout import sampling_params
from tests.rollout.engine import Engine, Turn, check_sample
from tests.tiny_model import make_byte_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("examples") / "model"
    tokenizer = make_byte_tokenizer(1 << 16)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + str(tokenizer.chat_template)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def play(folder: str) -> Callable[..., tuple[Any, Engine]]:
    """play(name, sample, [turn, …], flag=value) -> (what the agent returned, engine)."""

    def start(name: str, sample: Sample, turns: list[Turn], **changes: Any) -> tuple[Any, Engine]:
        path = f"plugins.agents.{name}.generate"
        assert check_hook("custom_generate_function_path", path) is None
        values = {"hf_checkpoint": folder, "rollout_max_response_len": 500, "rollout_max_context_len": 4000}
        args = Config.from_flat(values | {"apply_chat_template": True, "rm_type": "exact"} | changes).to_args()
        engine = Engine(load_tokenizer(folder), turns)
        return engine.serve(args, lambda: load_function(path)(args, sample, sampling_params(args))), engine

    return start


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_retool(play: Any) -> None:
    script = '<tool_call>\n{"name": "python", "arguments": {"code": "print(sum(range(101)))"}}\n</tool_call>'
    sample = Sample(messages=[{"role": "user", "content": "1 + … + 100?"}], label="5050")
    made, engine = play("retool", sample, [Turn(script), Turn("5050")], tool_call_parser="qwen25")
    between = check_sample(made, engine.exchanges)
    assert engine.tokenizer.decode(between[0]) == "\n<|im_start|>tool\n5050<|im_end|>\n<|im_start|>assistant\n"
    assert made.status == Sample.Status.COMPLETED


def test_search_r1(play: Any, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_rows([{"title": "Oslo", "text": "capital of Norway"}, {"text": "cats purr"}])
    monkeypatch.setenv("SEARCH_CORPUS", str(corpus))
    load_function("plugins.agents.search_r1.search_tool").cache_clear()  # type: ignore[attr-defined]
    search = Turn("I look. <search> capital Norway </search>", end=None)
    answer = Turn("<answer>Oslo</answer>", end=None)
    sample, engine = play("search_r1", Sample(prompt="Norway's capital? "), [search, answer])
    between = [engine.tokenizer.decode(tokens) for tokens in check_sample(sample, engine.exchanges)]
    assert between == ["\n<information>(1) Oslo: capital of Norway</information>\n", ""]
    assert sample.status == Sample.Status.COMPLETED
    assert engine.exchanges[0].asked["sampling_params"]["stop"] == ["</search>", "</answer>"]
    # A token that holds the stop string's end and a line break: the search is run all the same.
    more = Turn("<search> Norway </search>\n", end=None, finish={"type": "stop", "matched": "</search>"})
    sample, engine = play("search_r1", Sample(prompt="Norway's capital? "), [more, answer])
    assert len(engine.exchanges) == 2 and "Oslo: capital of Norway" in sample.response
    # The last turn's search is not run, and the sample is cut short.
    sample, engine = play("search_r1", Sample(prompt="?"), [search, search], max_turns=2)
    assert check_sample(sample, engine.exchanges)[1:] == [[]]
    assert (len(engine.exchanges), sample.status) == (2, Sample.Status.TRUNCATED)
    monkeypatch.delenv("SEARCH_CORPUS")
    load_function("plugins.agents.search_r1.search_tool").cache_clear()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="set SEARCH_CORPUS"):
        play("search_r1", Sample(prompt="?"), [search])


def test_solver_and_critic(play: Any) -> None:
    sample = Sample(index=4, group_index=2, messages=[{"role": "user", "content": "2 + 2?"}], label="4")
    made, engine = play("solver_critic", sample, [Turn("5"), Turn("It is wrong."), Turn("4")])
    assert [one.response for one in made] == ["5", "It is wrong.", "4"]
    assert [one.reward for one in made] == [1.0] * 3, "the final solution pays for all"
    assert {(one.index, one.group_index) for one in made} == {(4, 2)}
    for one, exchange in zip(made, engine.exchanges, strict=True):
        assert check_sample(one, [exchange]) == [[]]
    last = engine.tokenizer.decode(made[2].tokens)
    assert [
        last.index(part) for part in ("2 + 2?", "\n5<", "Check this", "It is wrong.", "Give your", "\n4<")
    ] == sorted(last.index(part) for part in ("2 + 2?", "\n5<", "Check this", "It is wrong.", "Give your", "\n4<"))
    made, _ = play("solver_critic", sample, [Turn("5"), Turn("It", end=None, finish={"type": "abort"})])
    assert [one.status.value for one in made] == ["completed", "aborted"]
