"""The agents of plugins/agents against a scripted HTTP engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.hooks import check_hook, load_function
from fusionrl.data.sample import Sample
from tests.rollout import engine as scripted
from tests.rollout.engine import Engine, Turn, call, check_sample, needs, response


@pytest.fixture
def play(folder: str) -> Callable[..., tuple[Any, Engine]]:
    """play(name, sample, [turn, …], flag=value) -> (what the agent returned, engine)."""

    def start(name: str, sample: Sample, turns: list[Turn | str], **changes: Any) -> tuple[Any, Engine]:
        path = f"plugins.agents.{name}.generate"
        assert check_hook("custom_generate_function_path", path) is None
        flags = {"rollout_max_response_len": 500, "apply_chat_template": True, "rm_type": "exact"}
        return scripted.play(load_function(path), folder, sample, turns, **flags | changes)

    return start


@needs("sglang")
def test_retool(play: Any) -> None:
    sample = Sample(messages=[{"role": "user", "content": "1 + … + 100?"}], label="5050")
    turns = [call("python", code="print(sum(range(101)))"), "5050"]
    made, engine = play("retool", sample, turns, tool_call_parser="qwen25")
    assert engine.texts(made) == [response("5050"), ""]
    assert made.status == Sample.Status.COMPLETED


def test_search_r1(play: Any, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_rows([{"title": "Oslo", "text": "capital of Norway"}, {"text": "cats purr"}])
    monkeypatch.setenv("SEARCH_CORPUS", str(corpus))
    forget: Any = load_function("plugins.agents.search_r1.search_tool")
    forget.cache_clear()
    search = Turn("I look. <search> capital Norway </search>", end=None)
    answer = Turn("<answer>Oslo</answer>", end=None)
    sample, engine = play("search_r1", Sample(prompt="Norway's capital? "), [search, answer])
    assert engine.texts(sample) == ["\n<information>(1) Oslo: capital of Norway</information>\n", ""]
    assert sample.status == Sample.Status.COMPLETED
    assert engine.exchanges[0].asked["sampling_params"]["stop"] == ["</search>", "</answer>"]
    # A token that holds the stop string's end and a line break: the search is run all the same.
    more = Turn("<search> Norway </search>\n", end=None, finish={"type": "stop", "matched": "</search>"})
    sample, engine = play("search_r1", Sample(prompt="Norway's capital? "), [more, answer])
    assert len(engine.exchanges) == 2 and "Oslo: capital of Norway" in sample.response
    # The last turn's search is not run, and the sample is cut short.
    sample, engine = play("search_r1", Sample(prompt="?"), [search, search], max_turns=2)
    assert engine.texts(sample)[1:] == [""]
    assert (len(engine.exchanges), sample.status) == (2, Sample.Status.TRUNCATED)
    monkeypatch.delenv("SEARCH_CORPUS")
    forget.cache_clear()
    with pytest.raises(ValueError, match="set SEARCH_CORPUS"):
        play("search_r1", Sample(prompt="?"), [search])


def test_solver_and_critic(play: Any) -> None:
    sample = Sample(index=4, group_index=2, messages=[{"role": "user", "content": "2 + 2?"}], label="4")
    made, engine = play("solver_critic", sample, ["5", "It is wrong.", "4"])
    assert [(one.response, one.reward, one.index, one.group_index) for one in made] == [
        (text, 1.0, 4, 2) for text in ("5", "It is wrong.", "4")
    ], "the final solution pays for all"
    for one, exchange in zip(made, engine.exchanges, strict=True):
        assert check_sample(one, [exchange]) == [[]]
    last = engine.tokenizer.decode(made[2].tokens)
    places = [last.index(part) for part in ("2 + 2?", "\n5<", "Check this", "It is wrong.", "Give your", "\n4<")]
    assert places == sorted(places)
    made, _ = play("solver_critic", sample, ["5", Turn("It", end=None, finish={"type": "abort"})])
    assert [one.status.value for one in made] == ["completed", "aborted"]
