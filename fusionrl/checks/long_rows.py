"""The longest text that a model takes, and the longest rows of a set of prompts."""

from __future__ import annotations

import contextlib
import heapq
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fusionrl.data.findings import FindingError
from fusionrl.data.image_rows import header_ref, read_images
from fusionrl.data.prompts import PromptColumns, metadata_and_tools, render_prompt
from fusionrl.data.row_checks import see
from fusionrl.data.rows import Row, parse_set, scan_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_CANDIDATES = 256  # rows that are tokenized, those with the most bytes first …
BUDGET_S = 5.0  # … for at most so long
# Tokens that a chat template may add to the text: its own words, and the marks of each message.
TEMPLATE_TOKENS, MESSAGE_TOKENS = 256, 16


IMAGE_TOKENS = "\0image tokens"  # of a row of `light_row`: tokens of each of its images


class LongRow(NamedTuple):
    """A row: its place in the file and its number of tokens."""

    place: str
    num_tokens: int


def context_length(max_positions: int, rope_scaling: Mapping[str, object] | None) -> int:
    """Tokens of a prompt with its response that a model's config.json allows for.

    `max_positions` counts the scaled positions where `rope_scaling` names the original ones (yarn) or is llama3's; any
    other scaling multiplies them by its factor. So SGLang counts (`get_context_length`), and transformers' models too.
    """
    if not rope_scaling or "original_max_position_embeddings" in rope_scaling:
        return max_positions
    if rope_scaling.get("rope_type") in ("default", "llama3"):
        return max_positions
    factor = rope_scaling.get("factor", 1)
    if not isinstance(factor, int | float):
        raise ValueError(f"rope_scaling has the factor {factor!r}, not a number")
    return int(factor * max_positions)


def most_bytes(
    rows: Iterable[tuple[str, Row]], keys: tuple[str | None, ...], metadata_key: str | None = None
) -> list[tuple[int, str, Row]]:
    """Return the rows with the most text in the columns `keys`, longest first: (tokens at most, place, row).

    A tokenizer makes at most one token of a byte, apart from the marks that a template adds.

    metadata_key  column of metadata, which may hold tools
    """
    sized = _sized(rows, keys, metadata_key)
    return [(size, place, row) for size, _, place, row in heapq.nlargest(NUM_CANDIDATES, sized)]


def fewest_bytes(rows: Iterable[tuple[str, Row]], keys: tuple[str | None, ...]) -> list[Row]:
    """The rows with the least text in the columns `keys`, shortest first."""
    return [row for _, _, _, row in heapq.nsmallest(NUM_CANDIDATES, _sized(rows, keys))]


def _sized(
    rows: Iterable[tuple[str, Row]], keys: tuple[str | None, ...], metadata_key: str | None = None
) -> Iterable[tuple[int, int, str, Row]]:
    for number, (place, row) in enumerate(rows):
        values = [row[key] for key in keys if key is not None and row.get(key) is not None]
        metadata = row.get(metadata_key or "")
        if isinstance(metadata, dict | str) and "tools" in metadata:  # an object, or its JSON
            values.append(metadata["tools"] if isinstance(metadata, dict) else metadata)
        num_messages = sum(len(value) for value in values if isinstance(value, list))
        num_bytes = sum(_num_bytes(value) for value in values) + sum(row.get(IMAGE_TOKENS, ()))
        # The number, so that no two rows of one size are compared by their contents.
        yield num_bytes + MESSAGE_TOKENS * num_messages + TEMPLATE_TOKENS, -number, place, row


def _num_bytes(value: object) -> int:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return len(text.encode(errors="surrogatepass"))


def light_rows(spec: str, columns: PromptColumns, is_sft: bool = False) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) of the rows that can be read, with the numbers of tokens of their images in place of these."""
    data_file = parse_set(spec, "").path
    for place, row in scan_rows(spec, ""):
        with contextlib.suppress(ValueError):
            if not isinstance(row, ValueError):
                yield place, _light_row(row, columns, is_sft, data_file)


def _light_row(row: Row, columns: PromptColumns, is_sft: bool, data_file: Path) -> Row:
    if (column := columns.images) is None:
        return row
    seen = see(row, columns, is_sft)
    images, findings = read_images(seen.values, column, column.folder_of(data_file), header_ref)
    if findings:
        raise FindingError(findings[0])
    rest = {key: value for key, value in row.items() if key != column.key}
    return {**rest, columns.input_key: seen.prompt, IMAGE_TOKENS: [image.num_tokens for image in images]}


def added_tokens(row: Row) -> int:
    """Return the tokens of a row's images beyond one for each, which a rendering has."""
    return sum(count - 1 for count in row.get(IMAGE_TOKENS, ()))


def count_tokens(row: Row, tokenizer: PreTrainedTokenizerBase, columns: PromptColumns) -> int:
    tools = metadata_and_tools(row, columns)[1]
    prompt = render_prompt(row[columns.input_key], tokenizer, columns, tools)
    return len(tokenizer.encode(prompt, add_special_tokens=False)) + added_tokens(row)


def first_over(
    candidates: Iterable[tuple[int, str, Row]], limit: int, count: Callable[[Row], int | None]
) -> LongRow | None:
    """The first of `candidates` (as `most_bytes` gives them) with more than `limit` tokens.

    count  a row's tokens; None where the run leaves the row out
    """
    deadline = time.monotonic() + BUDGET_S
    for at_most, place, row in candidates:
        if at_most <= limit or time.monotonic() > deadline:
            return None
        num_tokens = count(row)
        if num_tokens is not None and num_tokens > limit:
            return LongRow(place, num_tokens)
    return None
