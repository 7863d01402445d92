"""Files of rollouts' samples: for `fusionrl show` and `fusionrl view`, and those of --save-debug-rollout-data.

Values of single samples that trainers computed are written next to a rollout's file and in its order.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.config.config import Config
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample
from fusionrl.data.sample_json import read_samples
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.observe.formats import json_line
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.plan.plan import Plan

logger = logging.getLogger(__name__)

# Samples of --mode sft only repeat the data: a run of billions of tokens would fill a disk with them.
SFT_BYTES = 2**30


class SampleFiles:
    """Writes the samples of rollouts; in mode sft until the files of all attempts have `SFT_BYTES`."""

    def __init__(self, config: Config, writer: RolloutWriter, attempt: int) -> None:
        self._config, self._writer, self._attempt = config, writer, attempt
        files = (path for pattern in ("*.train.a*.jsonl", "images/*.jpg") for path in writer.folder.glob(pattern))
        self._num_bytes = sum(path.stat().st_size for path in files) if config.run.mode == "sft" else 0
        self._has_room = True

    def write(self, rollout_id: int, samples: Sequence[Sample]) -> Path | None:
        """Write a rollout's samples and return their file; None for a rollout of mode sft that has no room."""
        if self._config.run.mode != "sft":
            write_pictures(self._writer, samples)
            return self._writer.write(rollout_id, self._attempt, (sample.to_row() for sample in samples))
        if self._num_bytes >= SFT_BYTES:
            if self._has_room:
                step, size = rollout_id + 1, self._num_bytes / 2**30
                logger.info("rollouts/ has %.1f GiB of samples: those of step %d and later are left out", size, step)
            self._has_room = False
            return None
        self._num_bytes += write_pictures(self._writer, samples)
        path = self._writer.write(rollout_id, self._attempt, self._supervised_rows(samples))
        self._num_bytes += path.stat().st_size
        return path

    def _supervised_rows(self, samples: Sequence[Sample]) -> Iterator[dict[str, object]]:
        """Rows with the text of the tokens, as rendered, and without a reward: nothing has graded them."""
        tokenizer = load_tokenizer(str(self._config.model.hf_checkpoint))
        for sample in samples:
            tokens = np.asarray(sample.array("tokens"))
            parts = {"prompt": tokens[: sample.prompt_length], "response": tokens[sample.prompt_length :]}
            texts = {name: tokenizer.decode(part, clean_up_tokenization_spaces=False) for name, part in parts.items()}
            yield sample.to_row() | texts | {"reward": None}


def write_pictures(writer: RolloutWriter, samples: Iterable[Sample]) -> int:
    """Write a small picture of each image of the samples, once; returns the bytes written."""
    images = {image.key: image for sample in samples for _, image in sample.image_spans}.values()
    return sum(writer.add_picture(image.key, partial(IMAGES.thumbnail, image)) for image in images)


def save_samples(pattern: str, rollout_id: int, samples: Sequence[Sample]) -> None:
    """Write the samples to the file that `pattern` names, with `{rollout_id}` filled in, and images next to it."""
    path = Path(pattern.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    IMAGES.save((image for sample in samples for _, image in sample.image_spans), path.parent / "images")
    with path.open("wb") as out:
        out.writelines(json_line(sample.to_row()) for sample in samples)


def load_samples(pattern: str, rollout_id: int, plan: Plan) -> list[Sample]:
    """Read what `save_samples` wrote; numbers in it are checked against the plan's model."""
    path = Path(pattern.format(rollout_id=rollout_id))
    if not path.is_file():
        raise ValueError(f"--load-debug-rollout-data: there is no {path}")
    try:
        samples = read_samples(path, plan.shape.vocab_size, plan.shape.num_experts or None)
    except ValueError as error:
        raise ValueError(f"--load-debug-rollout-data: {error}") from error
    IMAGES.load((image for sample in samples for _, image in sample.image_spans), path.parent / "images")
    return samples


KEPT = 3  # rollouts whose samples may still be trained on


TrainedColumns = dict[int, dict[str, object]]
"""What one rank found out: position of a sample in its shard → name → value."""


class TrainedSamples:
    """Knows on which line of which file each sample of a train shard stands.

    Trainers number samples by their position in what they were given; a user's conversion and DPO's pairs choose and
    reorder, so a position is not a line number.
    """

    def __init__(self, writer: RolloutWriter) -> None:
        self._writer = writer
        self._given: dict[int, tuple[Path, list[int | None]]] = {}  # rollout -> file, line of each position

    def gave(
        self,
        rollout_id: int,
        path: Path,
        written: Sequence[Sample],
        samples: Sequence[Sample],
        has_indices: bool = True,
    ) -> None:
        """Note that `samples` go to the trainers: those of the file, or with `has_indices` others with their indices.

        `written` are the samples of the lines of `path`, the rollout's file.
        """
        by_identity = {id(sample): line for line, sample in enumerate(written)}
        is_other = has_indices and any(id(sample) not in by_identity for sample in samples)
        counts = Counter(sample.index for sample in written if is_other)
        by_index = {s.index: line for line, s in enumerate(written) if counts[s.index] == 1}
        lines = []
        for sample in samples:
            line = by_identity.get(id(sample))
            if line is None and not sample.remove_sample:  # a blank of DPO has the index of another sample
                line = by_index.get(sample.index)
            lines.append(line)
        self._given[rollout_id] = (path, lines)
        for old in [key for key in self._given if key <= rollout_id - KEPT]:
            del self._given[old]

    def add(self, rollout_id: int, columns: Sequence[Mapping[int, Mapping[str, object]]]) -> Path | None:
        """Write what the ranks found out, position -> name -> value, as rows with their `line` (from 0).

        Returns the file; None where the rollout is not known (any more) or nothing was found.
        """
        if rollout_id not in self._given:
            return None
        path, lines = self._given.pop(rollout_id)
        rows: dict[int, dict[str, Any]] = {}
        for part in columns:
            for position, values in part.items():
                line = lines[position]
                if line is not None and line not in rows:
                    rows[line] = {"line": line, **values}
        return self._writer.write_trained(path, (rows[line] for line in sorted(rows))) if rows else None
