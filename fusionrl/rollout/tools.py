"""Tools that a model may call, in the OpenAI format: the protocol, Python in the sandbox, and search by BM25."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fusionrl.base.wording import install_hint
from fusionrl.data.prompts import read_rows
from fusionrl.sandbox import Limits, SandboxError, probe, run_python

if TYPE_CHECKING:
    from bm25s import BM25
    from PIL.Image import Image


class Tool(Protocol):
    """The interface of a tool in the agent loop.

    schema  `{"type": "function", "function": {"name", "description", "parameters"}}`, the parameters a JSON schema;
            it goes into the prompt by the chat template, and arguments are checked against it
    """

    schema: dict[str, Any]

    def __call__(self, *_: Any, **arguments: Any) -> Awaitable[str | ToolAnswer]:
        """Return the text for the model; a tool writes it as `async def __call__(self, town: str) -> str`, for example.
        A `ToolAnswer` has images, too.

        The model gets a ToolError's text as well; any other exception ends the rollout.
        """
        ...


@dataclass(frozen=True)
class ToolAnswer:
    """What a tool shows a model that sees: images of any size, and a text behind them.

    An image is one of PIL, bytes of a file, a path or a `data:` URI.
    """

    text: str = ""
    images: Sequence[Image | bytes | str] = ()


class ToolError(Exception):
    """The call went wrong in a way that the model is to read, and may mend."""


def function_schema(name: str, description: str, **parameters: str) -> dict[str, object]:
    """The schema of a tool whose parameters are all required strings; each with its description."""
    properties = {parameter: {"type": "string", "description": text} for parameter, text in parameters.items()}
    function = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    return {"type": "function", "function": function}


def tool_name(tool: Tool) -> str:
    """The name by which the model calls it."""
    return str(tool.schema["function"]["name"])


class PythonTool:
    """Runs a script in the sandbox; every call starts afresh."""

    schema = function_schema(
        "python", "Run a Python script and read what it prints.", code="The script; print what you want to see."
    )

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits(output_bytes=16 << 10)

    async def __call__(self, code: str) -> str:
        """Standard output, then errors, then how the script was ended if it did not end itself.

        Raises SandboxError if the sandbox does not work any more, which is not because of this script.
        """
        try:
            result = await run_python(code, limits=self.limits)
        except SandboxError:
            await asyncio.to_thread(probe)  # raises, unless it was this script that has ended its sandbox
            return "[the script has ended its sandbox]"
        parts = [result.stdout.rstrip(), result.stderr.rstrip()]
        if result.killed_by:
            parts.append(f"[ended by the sandbox: {result.killed_by}]")
        return "\n".join(part for part in parts if part) or "[no output]"


class SearchTool:
    """The passages of a local corpus that BM25 ranks highest for a query."""

    schema = function_schema("search", "Search a collection of passages.", query="What to look for.")

    def __init__(self, corpus: str | Path, num_results: int = 3) -> None:
        """`corpus` is a .jsonl or .parquet file with the columns `text` and, if there are titles, `title`.

        Raises ValueError if there is no such file, a row has no text, or bm25s is not installed.
        """
        self.num_results = num_results
        self._passages, self._index = load_corpus(str(corpus))

    async def __call__(self, query: str) -> str:
        """The passages, numbered, best first; those without any word of the query are left out."""
        passages = await asyncio.to_thread(self.search, query)
        if not passages:
            return "[nothing found]"
        return "\n".join(f"({number}) {passage}" for number, passage in enumerate(passages, start=1))

    def search(self, query: str) -> list[str]:
        """At most `num_results` passages with a score above 0."""
        words = _bm25s().tokenize([query], show_progress=False, return_ids=False)
        number = min(self.num_results, len(self._passages))
        documents, scores = self._index.retrieve(words, k=number, show_progress=False)
        return [self._passages[i] for i, score in zip(documents[0], scores[0], strict=True) if score > 0]


@functools.cache
def load_corpus(path: str) -> tuple[Sequence[str], BM25]:
    """Passages of a corpus file and their BM25 index, once a process."""
    bm25s = _bm25s()
    passages: list[str] = []
    for place, row in read_rows(path, "search corpus"):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"search corpus {path}: {place}: no column 'text'; it has {sorted(row)}")
        passages.append(f"{row['title']}: {row['text']}" if row.get("title") else row["text"])
    if not passages:
        raise ValueError(f"search corpus {path}: the file has no rows")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    return passages, index


def _bm25s() -> ModuleType:
    try:
        import bm25s
    except ImportError as error:
        raise ValueError(f"the search tool needs the package bm25s; {install_hint('bm25s')}") from error
    return bm25s
