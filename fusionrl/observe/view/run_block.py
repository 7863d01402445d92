"""A run for the page: its metrics, its files, and the samples of as many of its steps as there is room for."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from fusionrl.observe.metrics import METRICS_FILE, RESERVED_KEYS, nonfinite_names, read_metrics
from fusionrl.observe.rollouts import RolloutFile, as_ranges, list_rollouts
from fusionrl.observe.run_dir import last_config
from fusionrl.observe.show import Samples, reward_key
from fusionrl.observe.view.step_block import Number, build_block, pack, short

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Token id → bytes.

    Byte-level vocabularies (GPT-2's and all after it) and those of SentencePiece are read; of another kind the entry
    itself is its text.
    """

    def __init__(self, entries: Mapping[int, str], special: Mapping[int, str], is_byte_level: bool) -> None:
        self._entries, self._special, self._is_byte_level = entries, special, is_byte_level

    @classmethod
    def read(cls, path: Path) -> Vocabulary | None:
        """Read a tokenizer.json; None if it is missing or not a tokenizer's."""
        try:
            content = orjson.loads(path.read_bytes())
            model = content["model"]
            vocab = model["vocab"]
            pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
            entries = {int(number): str(text) for text, number in pairs}
            special = {int(entry["id"]): str(entry["content"]) for entry in content.get("added_tokens") or ()}
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return None  # a page with ids in place of text is better than none
        return cls(entries, special, b'"ByteLevel"' in orjson.dumps(content.get("decoder")))

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token; None for one that the vocabulary does not have."""
        if token in self._special:
            return self._special[token].encode("utf-8", "replace")
        entry = self._entries.get(token)
        if entry is None:
            return None
        if self._is_byte_level and all(char in BYTES for char in entry):
            return bytes(BYTES[char] for char in entry)
        if match := _BYTE.fullmatch(entry):
            return bytes([int(match[1], 16)])
        return entry.replace("▁", " ").encode("utf-8", "replace")

    def pieces(self, tokens: Iterable[int]) -> dict[int, str]:
        """The bytes of each of these tokens that the vocabulary has, a character a byte (latin-1)."""
        pairs = ((token, self.bytes_of(token)) for token in sorted(set(tokens)))
        return {token: piece.decode("latin-1") for token, piece in pairs if piece is not None}


def _byte_characters() -> dict[str, int]:
    """Character of a byte-level vocabulary → byte: printable ones map to themselves, others to 256, 257, …."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


BYTES = _byte_characters()


Rows = Sequence[dict[str, Any]]  # lines of metrics.jsonl
MOST_STEPS = 20_000  # lines of a table; of a longer run every second one, every third, …
_WINDOW = 21  # steps that a value is compared with, half of them before it
_MOST_SPIKES = 8  # of one metric
_DIGITS = 6


@dataclass(frozen=True)
class Series:
    """Metrics by step, under their names."""

    steps: list[int] = field(default_factory=list)  # in order
    values: dict[str, list[Number]] = field(default_factory=dict)  # one for each of `steps`, None where there is none
    nonfinite: dict[str, list[int]] = field(default_factory=dict)  # places in `steps` at which it was NaN or infinite
    spikes: dict[str, list[int]] = field(default_factory=dict)  # places at which it jumps, the largest jump first
    num_left_out: int = 0  # steps of the run that are not in `steps`


def read_rows(run: Path) -> Rows:
    """Read `metrics.jsonl` of a run's folder; nothing where there is none yet."""
    return read_metrics(run) if (run / METRICS_FILE).is_file() else []


def series_of(rows: Rows, most_steps: int = MOST_STEPS) -> Series:
    """Put lines of `metrics.jsonl` into columns, at most so many of them."""
    stride = math.ceil(len(rows) / most_steps) or 1
    thinned = rows[::-1][::stride][::-1]  # the last step is always there
    names = sorted({name for row in thinned for name in row} - RESERVED_KEYS)
    values: dict[str, list[Number]] = {}
    for name in names:
        numbers = [short(row.get(name), _DIGITS) for row in thinned]
        if any(number is not None for number in numbers) or any(name in nonfinite_names(row) for row in thinned):
            values[name] = numbers
    nonfinite = {name: [i for i, row in enumerate(thinned) if name in nonfinite_names(row)] for name in values}
    return Series(
        steps=[int(row["step"]) for row in thinned],
        values=values,
        nonfinite={name: places for name, places in nonfinite.items() if places},
        spikes={name: places for name, numbers in values.items() if (places := find_spikes(numbers))},
        num_left_out=len(rows) - len(thinned),
    )


def find_spikes(values: Sequence[Number]) -> list[int]:
    """Return the places of values that stand out from those around them, the farthest first.

    A value stands out if it is 6 robust standard deviations (1.4826 times the median deviation) from the median of its
    21 neighbours, and by a tenth of the range of all values. Too few values, or values that hardly change, have none.
    """
    places = np.array([i for i, value in enumerate(values) if value is not None], dtype=np.int64)
    if len(places) < 8:
        return []
    known = np.array([values[i] for i in places], dtype=np.float64)
    half = min(_WINDOW, len(known) - (1 - len(known) % 2)) // 2
    around = np.lib.stride_tricks.sliding_window_view(np.pad(known, half, mode="reflect"), 2 * half + 1)
    middle = np.median(around, axis=1)
    spread = 1.4826 * np.median(np.abs(around - middle[:, None]), axis=1)
    away = np.abs(known - middle)
    range_of_all = float(known.max() - known.min())
    out = (away > 6 * spread) & (away > 0.1 * range_of_all) & (range_of_all > 1e-9 * np.abs(known).max())
    spikes = np.flatnonzero(out)
    spikes = spikes[np.argsort(-away[spikes], kind="stable")][:_MOST_SPIKES]
    return [int(place) for place in places[spikes]]


def notable_steps(series: Series) -> list[int]:
    """Return the steps worth a look, the ones at which most metrics jump first, then those with a NaN."""
    counts: dict[int, int] = {}
    for group, weight in ((series.spikes, 1), (series.nonfinite, 2)):
        for places in group.values():
            for place in places:
                counts[series.steps[place]] = counts.get(series.steps[place], 0) + weight
    return sorted(counts, key=lambda step: (-counts[step], step))


_LEAST_ROOM = 48_000  # bytes of a step, below which fewer steps are better than fewer samples of each
_PER_FILE, _MOST_VOCABULARY = 80, 1_500_000  # bytes
_TRIES = 4  # with less and less room for samples, where the rest of the page is larger than was estimated


class NoRoomError(ValueError):
    """A run takes more bytes than it may, also without a sample; `needed` of them."""

    def __init__(self, run: Path, needed: int) -> None:
        super().__init__(f"{run} takes {needed:,} bytes without a sample")
        self.needed = needed


@dataclass(frozen=True)
class RunBlock:
    """A run as the page carries it."""

    facts: dict[str, Any]  # metrics, files and settings, as JSON can hold them
    blocks: dict[str, str]  # name of a block → packed samples of a file

    def size(self) -> int:
        return len(pack(self.facts)) + sum(len(text) for text in self.blocks.values())


def build_run(run: Path, number: int, room: int, steps: range | None = None, vocabulary: str = "") -> RunBlock:
    """Read a run's folder, also of a live run, into at most `room` bytes of base64.

    number      of the run on the page, from 0
    steps       samples of these steps alone; None: of those that `choose_files` chooses
    vocabulary  a folder with a tokenizer.json; "": the one of the run's configuration

    Raises:
        ValueError: metrics.jsonl cannot be read, or there is neither a metric nor a sample.
        NoRoomError: the metrics of one step, the settings and the list of files are larger than `room`.
    """
    files = list_rollouts(run)
    series = _fitting_series(run, room, files)
    pieces = vocabulary_of(run, vocabulary)
    most = room
    for left in reversed(range(_TRIES)):
        block = _build(run, number, most, steps, series, files, pieces)
        over = block.size() - room
        if over <= 0:
            return block
        most = most - over - room // 50 if left > 1 else 0
    raise NoRoomError(run, block.size())


def _fitting_series(run: Path, room: int, files: Sequence[RolloutFile]) -> Series:
    """Read the metrics, of so many steps that they and the settings take at most half of the room."""
    rows = read_rows(run)  # once: a live run adds lines
    series = series_of(rows)
    while (size := len(pack(_facts(run, series, files)))) > room // 2 and len(series.steps) > 1:
        most = len(series.steps)
        series = series_of(rows, max(min(most * (room // 2) // size, most * 3 // 4), 1))
    return series


def _build(
    run: Path,
    number: int,
    room: int,
    steps: range | None,
    series: Series,
    files: Sequence[RolloutFile],
    pieces: Vocabulary | None,
) -> RunBlock:
    facts = _facts(run, series, files)
    # The list of files and the texts of tokens are made last: so much is kept for them.
    room -= len(pack(facts)) + _PER_FILE * len(files)
    room -= min(_MOST_VOCABULARY, room // 6)
    selected = [file for file in files if steps is None or file.step in steps]
    if steps is not None and not selected:
        raise ValueError(
            f"--steps {steps.start}-{steps.stop - 1}: {run} has samples of steps {as_ranges({f.step for f in files})}"
        )
    chosen = choose_files(selected, series, max(room // _LEAST_ROOM, 1))
    numbers, token_ids = dict[str, int](), set[int]()
    prompts = defaultdict[int, list[tuple[int, int]]](list)  # number → (place of the file, line) where it stands
    listed: list[dict[str, Any]] = []
    blocks: dict[str, str] = {}
    for place, file in enumerate(files):
        entry: dict[str, Any] = {"step": file.step, "kind": file.kind, "attempt": file.attempt, "block": None}
        listed.append(entry)
        if file not in chosen:
            continue
        share = max(room, 0) // (len(chosen) - len(blocks))
        block = build_block(Samples(file, reward_key(run, file)), share, numbers)
        for prompt, line in block.prompts:
            prompts[prompt].append((place, line))
        entry |= block.facts
        if block.text is None:
            chosen.remove(file)
            continue
        blocks[f"run{number}-{place}"] = block.text
        entry["block"] = f"run{number}-{place}"
        room -= len(block.text)
        token_ids |= block.token_ids
    facts |= {
        "files": listed,
        "repeats": {prompt: places for prompt, places in prompts.items() if len(places) > 1},
        "vocabulary": pieces.pieces(token_ids) if pieces is not None else None,
        "left_out": list(_left_out(series, listed)),
    }
    return RunBlock(facts, blocks)


def choose_files(files: Sequence[RolloutFile], series: Series, most: int) -> set[RolloutFile]:
    """Choose the files whose samples the page has: all, or the last, the first, those of steps where metrics jump (half
    of the rest), and others evenly over the run."""
    if len(files) <= most:
        return set(files)
    chosen = dict.fromkeys([files[-1], files[0]][:most])
    notable = notable_steps(series)
    ranks = {step: rank for rank, step in enumerate(notable)}
    for file in sorted((file for file in files if file.step in ranks), key=lambda file: ranks[file.step]):
        if len(chosen) >= max(most // 2, 2):
            break
        chosen[file] = None
    remaining = [file for file in files if file not in chosen]
    missing = most - len(chosen)
    return set(chosen) | {remaining[i * len(remaining) // missing] for i in range(max(missing, 0))}


def metrics_of(run: Path) -> tuple[dict[str, object], list[str]]:
    """Return the facts of a run without its samples, and sentences about what is left out; raises as `build_run`."""
    series = series_of(read_rows(run))
    return _facts(run, series, list_rollouts(run)), list(_left_out(series, []))


def _facts(run: Path, series: Series, files: Sequence[RolloutFile]) -> dict[str, object]:
    if not series.steps and not files:
        raise ValueError(f"{run} has neither metrics nor samples: no step is finished yet, or it is not a run folder")
    facts: dict[str, object] = {"name": run.resolve().name, "path": str(run), "config": last_config(run) or {}}
    facts |= {"steps": series.steps, "metrics": series.values}
    return facts | {"nonfinite": series.nonfinite, "spikes": series.spikes}


def vocabulary_of(run: Path, folder: str) -> Vocabulary | None:
    """Read the vocabulary of a folder, or where it is "", of the run's --hf-checkpoint; None where there is none.

    Raises:
        ValueError: the folder that was named has none.
    """
    model = (last_config(run) or {}).get("model")
    of_run = str(model.get("hf_checkpoint") or "") if isinstance(model, dict) else ""
    file = Path(folder or of_run) / "tokenizer.json"
    vocabulary = Vocabulary.read(file) if folder or of_run else None
    if folder and vocabulary is None:
        raise ValueError(
            f"--tokenizer {folder}: {file} is missing or no tokenizer's; name a folder with a tokenizer.json"
        )
    return vocabulary


def _left_out(series: Series, files: list[dict[str, Any]]) -> Iterator[str]:
    """Say what of the run the page does not have."""
    if series.num_left_out:
        yield f"metrics of {series.num_left_out:,} steps"
    if without := sorted({file["step"] for file in files if file["block"] is None}):
        listed = as_ranges(without)
        more = f" ({listed})" if len(listed) <= 200 else ""
        yield f"samples of {len(without):,} steps{more}; --steps A-B chooses others"
    if num_cut := sum(file["samples"] - file["kept"] for file in files if "samples" in file):
        yield f"texts and tokens of {num_cut:,} samples of the steps that are here; their numbers are here"
