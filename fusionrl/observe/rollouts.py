"""Rollouts on disk: a file a rollout, a JSON line a sample, written whole or not at all, and never overwritten.

`<run_dir>/rollouts/step_<step>.<kind>.a<attempt>.jsonl`, kind being "train", "eval-<set>" or a name of the caller's.
`step` is that of metrics.jsonl, of eval/<step>.json and of checkpoints/step_<step>: the number of finished rollouts. So
`step_000003.train.a1.jsonl` has the samples that the line of step 3 was trained on, which hooks know as rollout_id 2.

Runs of earlier versions have `<kind>_<number>.a<attempt>.jsonl`, numbered by rollout_id; they are read as well.

`rollouts/images/` has a small picture of each image of a sample, `<key>.jpg`; a sample's `image_spans` have the keys.

`rollouts/trained/` has a file of the same name with what the trainers found out about the samples: each row has the
`line` (from 0) of its sample, and one value a sample or an array over its response tokens under each name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusionrl.observe.formats import json_line, parse_object, write_atomically

_NAME = re.compile(r"step_(?P<number>\d{6,})\.(?P<kind>[A-Za-z0-9][\w-]*)\.a(?P<attempt>\d+)\.jsonl")
_EARLIER_NAME = re.compile(r"(?P<kind>[A-Za-z0-9][\w-]*)_(?P<number>\d{6,})\.a(?P<attempt>\d+)\.jsonl")
_KEY = re.compile(r"[0-9a-f]+")
_KIND = re.compile(r"[A-Za-z0-9][\w-]*")
# What runs over a sample's tokens, and in how many dimensions.
_ARRAYS = dict.fromkeys(("tokens", "prompt_tokens", "loss_mask", "weight_versions"), 1)
_ARRAYS |= {"rollout_log_probs": 1, "teacher_log_probs": 1, "rollout_routed_experts": 3}
TOKEN_VALUES = ("log_probs", "entropy", "advantages")  # the trainers' values of each token (--save-token-values)
_TRAINED_ARRAYS = dict.fromkeys(TOKEN_VALUES, 1)
EVAL_KIND = "eval-"  # kind of an evaluation's samples: this, and the set's name
FAILED_KINDS = frozenset(("failed", "eval-failed"))  # samples at which a user's function raised


def step_of(number: int, kind: str) -> int:
    """The step of a rollout that hooks know by `number`: they count rollouts from 0, steps count finished ones.

    An evaluation is numbered by the step that it follows.
    """
    return number if kind.startswith(EVAL_KIND) else number + 1


@dataclass(frozen=True, order=True)
class RolloutFile:
    """One finished rollout file, and what its name says of it."""

    rollout_id: int  # as hooks know it
    kind: str
    attempt: int
    path: Path

    @property
    def step(self) -> int:
        """The step of metrics.jsonl that the file belongs to."""
        return step_of(self.rollout_id, self.kind)

    @classmethod
    def named(cls, path: Path) -> RolloutFile | None:
        """The file at `path`, by its name; None for a file of another kind."""
        match = _NAME.fullmatch(path.name) or _EARLIER_NAME.fullmatch(path.name)
        if match is None:
            return None
        number = int(match["number"]) - (step_of(0, match["kind"]) if match.re is _NAME else 0)
        return cls(number, match["kind"], int(match["attempt"]), path)

    def rows(self) -> Iterator[dict[str, object]]:
        """The samples, one dictionary each, as they were written."""
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

    def scan(self) -> Iterator[tuple[int, dict[str, object] | None]]:
        """(offset in bytes, sample without what runs over its tokens) of each line, one in memory at a time.

        None for a line that is not a sample, as a copy of a file that is being written may end with.
        """
        for offset, line in _lines(self.path):
            light = parse_object(_without_arrays(line, _ARRAYS))
            yield offset, parse_object(line) if light is None else light

    def row_at(self, offset: int) -> dict[str, object]:
        """The sample whose line begins at `offset`."""
        return _row_at(self.path, offset)

    def trained(self) -> dict[int, dict[str, object]]:
        """Line (from 0) → what the trainers found out about its sample; {} where they have not (yet) trained on it."""
        return {line: self.trained_at(offset) for line, (offset, _) in self.scan_trained().items()}

    def scan_trained(self) -> dict[int, tuple[int, dict[str, object]]]:
        """Line (from 0) → (offset of the trainers' row, the row without what runs over tokens); as `trained`."""
        path = trained_file(self.path)
        rows: dict[int, tuple[int, dict[str, object]]] = {}
        for offset, text in _lines(path) if path.exists() else ():
            row = parse_object(_without_arrays(text, _TRAINED_ARRAYS)) or parse_object(text)
            if row is not None and isinstance(line := row.get("line"), int):
                rows[line] = offset, row
        return rows

    def trained_at(self, offset: int) -> dict[str, object]:
        """The trainers' row that begins at `offset` of their file."""
        return _row_at(trained_file(self.path), offset)


class RolloutWriter:
    """Writes `run_dir/rollouts/`; makes the folder."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = Path(run_dir) / "rollouts"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pictures: set[str] = set()  # keys of those that are written
        self.overwrites = False
        """Rollouts that this attempt has written may be made again."""

    def write(self, rollout_id: int, attempt: int, rows: Iterable[Mapping[str, object]], kind: str = "train") -> Path:
        """Write the samples of one rollout (its id as hooks know it, see `step_of`) and return the file's path.

        The file appears under its name only when it is complete; if `rows` raises, nothing is left behind.

        Raises:
            FileExistsError: this attempt has already written this rollout, and `overwrites` is not set.
            ValueError: the kind cannot be a part of a file name.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"rollout kind {kind!r} is not a file name; use letters, digits, '_', '-'")
        path = self.folder / f"step_{step_of(rollout_id, kind):06d}.{kind}.a{attempt}.jsonl"
        return _write_rows(path, rows, self.overwrites)

    def write_trained(self, path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
        """Write what the trainers found out about the samples of the rollout file `path`; as `write`."""
        path = trained_file(path)
        path.parent.mkdir(exist_ok=True)
        return _write_rows(path, rows, self.overwrites)

    def add_picture(self, key: str, make: Callable[[], bytes]) -> int:
        """Write the small picture of an image, once; `make` returns a JPEG file. Returns the bytes written."""
        path, content = picture_file(self.folder, key), b""
        if key not in self._pictures and not path.exists():
            path.parent.mkdir(exist_ok=True)
            content = make()
            write_atomically(path, [content])
        self._pictures.add(key)
        return len(content)


def picture_file(folder: Path, key: str) -> Path:
    """Return the file of an image's small picture, in a run's folder of rollouts."""
    return folder / "images" / f"{key}.jpg"


def images_of_row(row: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the images of a sample's row in order, each with its `key`, `height` and `width`."""
    spans = row.get("image_spans")
    images = [span[1] for span in spans if isinstance(span, list) and len(span) == 2] if isinstance(spans, list) else []
    return [image for image in images if isinstance(image, dict) and _KEY.fullmatch(str(image.get("key")))]


def trained_file(path: Path) -> Path:
    """Return the file of the trainers' results for the samples of a rollout file; it exists after training."""
    return path.parent / "trained" / path.name


def _write_rows(path: Path, rows: Iterable[Mapping[str, object]], overwrites: bool) -> Path:
    if path.exists() and not overwrites:
        raise FileExistsError(f"{path} exists; rollouts are never overwritten, a resume raises the attempt")
    write_atomically(path, map(json_line, rows))
    return path


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of each line that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield offset, line
            offset += len(line)


def _row_at(path: Path, offset: int) -> dict[str, object]:
    with path.open("rb") as file:
        file.seek(offset)
        row = parse_object(file.readline())
    assert row is not None, f"{path} has no row at {offset}"
    return row


def _without_arrays(line: bytes, arrays: Mapping[str, int]) -> bytes:
    """The line without arrays of numbers, which are nearly all of it: a tenth of the time to parse.

    Within a JSON text a quote is escaped, so only keys are found. Where a user's field of such a name holds something
    else, the result may not be JSON: then the whole line is to be parsed.
    """
    for name, depth in arrays.items():
        start = line.find(b'"%b":%b' % (name.encode(), b"[" * depth))
        end = line.find(b"]" * depth, start)
        if 0 <= start < end:
            line = line[:start] + b'"":0' + line[end + depth :]
    return line


def list_rollouts(run_dir: Path, kind: str | None = None, all_attempts: bool = False) -> list[RolloutFile]:
    """The rollout files of a run by step, at each step training first; of each the highest attempt, or all."""
    folder = Path(run_dir) / "rollouts"
    files = map(RolloutFile.named, folder.iterdir() if folder.is_dir() else ())
    listed = [file for file in files if file is not None and kind in (None, file.kind)]
    listed.sort(key=lambda file: (file.step, file.kind.startswith(EVAL_KIND), file.kind, file.attempt))
    # Sorted by attempt last, so that the highest is the one that stays.
    return listed if all_attempts else list({(file.rollout_id, file.kind): file for file in listed}.values())


def read_rollouts(run_dir: Path, kind: str | None = None, all_attempts: bool = False) -> Iterator[dict[str, object]]:
    """The samples of a run, lazily, with their file's "rollout_id"; "step", "kind", "attempt" where they lack one."""
    for file in list_rollouts(run_dir, kind, all_attempts):
        for row in file.rows():
            origin = {"step": file.step, "rollout_id": file.rollout_id, "kind": file.kind, "attempt": file.attempt}
            # A sample's own rollout_id, which it shares with the others of its attempt, is a number of another kind.
            row_values = {name: value for name, value in row.items() if value is not None and name != "rollout_id"}
            yield row | origin | row_values


def rollout_of_step(run_dir: Path, step: int | None = None, kind: str = "train") -> RolloutFile:
    """Return the last attempt's samples of a step (None: the last that has any); ValueError names those that have."""
    files = {file.step: file for file in list_rollouts(run_dir, kind)}
    if not files:
        raise ValueError(f"{run_dir} has no samples of kind {kind!r}")
    chosen_step = max(files) if step is None else step
    if chosen_step not in files:
        raise ValueError(f"--step {step}: {run_dir} has samples of step{'s' * (len(files) > 1)} {as_ranges(files)}")
    return files[chosen_step]


def as_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers, shortened: 1, 2, 3, 7 → "1-3, 7"."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
