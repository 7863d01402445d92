"""The tools: Python in the sandbox, and search against BM25 computed by hand."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import jsonschema
import pytest

from fusionrl.rollout import tools
from fusionrl.rollout.agent import ToolCall, call_tool
from fusionrl.rollout.sandbox import Limits, SandboxError
from fusionrl.rollout.tools import PythonTool, SearchTool, tool_name

PASSAGES = ["the moon circles the earth", "a cat sat on a mat near another cat", "cat food made of fish"]
PASSAGES += ["fish swim under the moon", "stock prices fell"]


def test_python_tells_output_errors_and_its_end() -> None:
    tool = PythonTool()
    assert tool_name(tool) == "python"
    assert asyncio.run(tool(code="print(2**10)")) == "1024"
    told = asyncio.run(tool(code="print('so far')\n1/0"))
    assert told.startswith("so far\nTraceback") and told.endswith("ZeroDivisionError: division by zero")
    assert asyncio.run(tool(code="x = 1")) == "[no output]"
    sleeper = PythonTool(Limits(wall_s=0.5))
    assert asyncio.run(sleeper(code="import time\ntime.sleep(60)")) == "[ended by the sandbox: wall time]"


def test_a_script_that_ends_its_sandbox_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = AsyncMock(side_effect=SandboxError("the sandbox gave no report: its launcher was killed"))
    monkeypatch.setattr(tools, "run_python", lost)
    assert asyncio.run(PythonTool()(code="x")) == "[the script has ended its sandbox]"
    monkeypatch.setattr(tools, "probe", Mock(side_effect=SandboxError("nothing starts here")))
    with pytest.raises(SandboxError, match="nothing starts here"):
        asyncio.run(PythonTool()(code="x"))


@pytest.mark.parametrize("code", ["[" * 100_000, "1" * 5000, '"\\ud800"'], ids=["deep", "long", "half a pair"])
def test_arguments_that_json_or_a_tokenizer_refuses_are_told(code: str) -> None:
    call = ToolCall("python", f'{{"code": {code}}}')
    result = asyncio.run(call_tool([PythonTool()], call, None, 9.0))
    assert result.is_error and result.text.startswith("error: wrong arguments for python: ")


def bm25(query: list[str], documents: list[list[str]], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Lucene's BM25, which is the library's default."""
    mean = sum(map(len, documents)) / len(documents)

    def score(word: str, words: list[str]) -> float:
        number, count = sum(word in other for other in documents), words.count(word)
        rarity = math.log(1 + (len(documents) - number + 0.5) / (number + 0.5))
        return rarity * count / (count + k1 * (1 - b + b * len(words) / mean))

    return [sum(score(word, words) for word in query) for words in documents]


def test_search_ranks_as_bm25_does(write_rows: Callable[..., Path]) -> None:
    path = write_rows([{"text": passage} for passage in PASSAGES])
    stop = {"the", "a", "on", "of"}  # of the library's stop words, those that occur here
    documents = [[word for word in passage.split() if word not in stop] for passage in PASSAGES]
    for query in ("cat fish", "moon", "prices moon cat", "zebra"):
        scores = bm25(query.split(), documents)
        wanted = [PASSAGES[i] for i in sorted(range(5), key=lambda i: -scores[i]) if scores[i] > 0][:3]
        assert SearchTool(path).search(query) == wanted, query


def test_search_tells_numbered_passages(write_rows: Callable[..., Path]) -> None:
    path = write_rows([{"title": "Moon", "text": "it is round"}, {"text": "cats purr"}])
    tool = SearchTool(path, num_results=5)
    jsonschema.validate({"query": "x"}, tool.schema["function"]["parameters"])
    assert asyncio.run(tool(query="round moon")) == "(1) Moon: it is round"
    assert asyncio.run(tool(query="zebra")) == "[nothing found]"


def test_bad_corpora_are_refused(write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="line 2: no column 'text'"):
        SearchTool(write_rows([{"text": "a"}, {"body": "b"}], "bad.jsonl"))
    with pytest.raises(ValueError, match="search corpus .*no.jsonl: there is no such file"):
        SearchTool("no.jsonl")
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(ValueError, match="needs the package bm25s"):
        SearchTool(write_rows([{"text": "a"}], "good.jsonl"))
