"""Values of single samples that trainers computed, written next to the rollout's file and in its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionrl.data.sample import Sample
from fusionrl.observe.rollouts import RolloutWriter

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

        path     the rollout's file
        written  the samples of its lines
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

        Returns:
            The file; None where the rollout is not known (any more) or nothing was found.
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
