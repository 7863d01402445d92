"""A run for the page: its metrics, its files, and the samples of as many of its steps as there is room for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fusionrl.observe.metrics import METRICS_FILE, read_metrics
from fusionrl.observe.rollouts import RolloutFile, as_ranges, list_rollouts
from fusionrl.observe.run_dir import last_config
from fusionrl.observe.show import Samples, reward_key
from fusionrl.observe.view.packing import pack
from fusionrl.observe.view.series import Series, notable_steps, read_series, series_of
from fusionrl.observe.view.step_block import build_block
from fusionrl.observe.view.vocabulary import Vocabulary

_LEAST_ROOM = 48_000  # bytes of a step, below which fewer steps are better than fewer samples of each
_PER_FILE, _MOST_VOCABULARY = 80, 1_500_000  # bytes
_TRIES = 4  # with less and less room for samples, where the rest of the page is larger than was estimated


class NoRoomError(ValueError):
    """A run takes more bytes than it may, also without a sample; `needed` of them."""

    def __init__(self, run: Path, needed: int) -> None:
        super().__init__(f"{run} takes {needed:,} bytes without a sample")
        self.run, self.needed = run, needed


@dataclass(frozen=True)
class RunBlock:
    """A run as the page carries it.

    facts    metrics, files and settings, as JSON can hold them
    blocks   name of a block → packed samples of a file
    num_samples, num_kept  of the files; of these with texts and tokens
    """

    facts: dict[str, object]
    blocks: dict[str, str]
    num_samples: int
    num_kept: int

    @property
    def left_out(self) -> list[str]:
        """Sentences about what of the run the page does not have."""
        sentences = self.facts["left_out"]
        assert isinstance(sentences, list)
        return sentences

    def size(self) -> int:
        """Bytes on the page."""
        return len(pack(self.facts)) + sum(len(text) for text in self.blocks.values())


@dataclass
class _Prompts:
    """Numbers of prompts, and where each stands: (place of the file, line of the group's first sample)."""

    numbers: dict[str, int] = field(default_factory=dict)
    places: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def of_file(self, place: int) -> Callable[[object, int], int]:
        """The function that numbers the prompts of one file."""

        def number(prompt: object, line: int) -> int:
            key = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
            number_of_prompt = self.numbers.setdefault(key, len(self.numbers))
            places = self.places.setdefault(number_of_prompt, [])
            if (place, line) not in places[-1:]:
                places.append((place, line))
            return number_of_prompt

        return number


def build_run(run: Path, number: int, room: int, steps: range | None = None, vocabulary: str = "") -> RunBlock:
    """Read a run's folder into at most `room` bytes.

    Args:
        run: the folder; the run may still be going.
        number: of the run on the page, from 0.
        room: in bytes of base64.
        steps: samples of these steps alone; None: of those that `choose_files` chooses.
        vocabulary: a folder with a tokenizer.json; "": the one of the run's configuration.

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
    if not (run / METRICS_FILE).is_file():
        return Series()
    rows = read_metrics(run)
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
    prompts, token_ids = _Prompts(), set[int]()
    listed: list[dict[str, object]] = []
    blocks: dict[str, str] = {}
    num_samples = num_kept = 0
    for place, file in enumerate(files):
        entry: dict[str, object] = {"step": file.step, "kind": file.kind, "attempt": file.attempt, "block": None}
        listed.append(entry)
        if file not in chosen:
            continue
        share = max(room, 0) // (len(chosen) - len(blocks))
        block = build_block(Samples(file, reward_key(run, file)), share, prompts.of_file(place))
        num_samples, num_kept = num_samples + block.num_samples, num_kept + block.num_kept
        entry |= {"samples": block.num_samples, "kept": block.num_kept, **block.facts}
        if block.text is None:
            chosen.remove(file)
            continue
        blocks[f"run{number}-{place}"] = block.text
        entry["block"] = f"run{number}-{place}"
        room -= len(block.text)
        token_ids |= block.token_ids
    facts |= {
        "files": listed,
        "repeats": {n: places for n, places in prompts.places.items() if len(places) > 1},
        "vocabulary": pieces.pieces(token_ids) if pieces is not None else None,
        "left_out": list(_left_out(series, listed, num_samples - num_kept)),
    }
    return RunBlock(facts, blocks, num_samples, num_kept)


def choose_files(files: Sequence[RolloutFile], series: Series, most: int) -> set[RolloutFile]:
    """Choose the files whose samples the page has: all, or the last one, the first, half of the rest at steps where
    metrics jump, and the others evenly over the run."""
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
    """Return the facts of a run without its samples, and sentences about what is left out of it.

    Raises:
        ValueError: as of `build_run`.
    """
    series = read_series(run)
    return _facts(run, series, list_rollouts(run)), list(_left_out(series, [], 0))


def _facts(run: Path, series: Series, files: Sequence[RolloutFile]) -> dict[str, object]:
    if not series.steps and not files:
        raise ValueError(f"{run} has neither metrics nor samples: no step is finished yet, or it is not a run folder")
    config = last_config(run) or {}
    return {
        "name": run.resolve().name,
        "path": str(run),
        "config": config,
        "steps": series.steps,
        "metrics": series.values,
        "nonfinite": series.nonfinite,
        "spikes": series.spikes,
    }


def vocabulary_of(run: Path, folder: str) -> Vocabulary | None:
    """Read the vocabulary of a folder, or where it is "", of the run's --hf-checkpoint; None where there is none.

    Raises:
        ValueError: the folder that was named has none.
    """
    if folder:
        vocabulary = Vocabulary.read(Path(folder) / "tokenizer.json")
        if vocabulary is None:
            raise ValueError(
                f"--tokenizer {folder}: {Path(folder) / 'tokenizer.json'} is missing or no tokenizer's; name a folder"
                " with a tokenizer.json"
            )
        return vocabulary
    model = (last_config(run) or {}).get("model")
    folder = str(model.get("hf_checkpoint") or "") if isinstance(model, dict) else ""
    return Vocabulary.read(Path(folder) / "tokenizer.json") if folder else None


def _left_out(series: Series, files: list[dict[str, object]], num_samples: int) -> Iterator[str]:
    """Say what of the run the page does not have."""
    if series.num_left_out:
        yield f"metrics of {series.num_left_out:,} steps"
    if without := sorted({int(str(file["step"])) for file in files if file["block"] is None}):
        listed = as_ranges(without)
        more = f" ({listed})" if len(listed) <= 200 else ""
        yield f"samples of {len(without):,} steps{more}; --steps A-B chooses others"
    if num_samples:
        yield f"texts and tokens of {num_samples:,} samples of the steps that are here; their numbers are here"
