"""--save-debug-rollout-data and --load-debug-rollout-data: the samples of a rollout as a file, before any stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusionrl.data.sample import Sample
from fusionrl.data.sample_checks import read_samples
from fusionrl.observe.json_values import json_line
from fusionrl.plan.plan import Plan


def save_samples(pattern: str, rollout_id: int, samples: Sequence[Sample]) -> None:
    """Write the samples to the file that `pattern` names, with `{rollout_id}` filled in."""
    path = Path(pattern.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        out.writelines(json_line(sample.to_row()) for sample in samples)


def load_samples(pattern: str, rollout_id: int, plan: Plan) -> list[Sample]:
    """Read what `save_samples` wrote; numbers in it are checked against the plan's model.

    Raises:
        ValueError: there is no such file, or it holds what is no sample.
    """
    path = Path(pattern.format(rollout_id=rollout_id))
    if not path.is_file():
        raise ValueError(f"--load-debug-rollout-data: there is no {path}")
    moe = plan.shape.moe
    try:
        return read_samples(path, plan.shape.vocab_size, moe.num_experts if moe is not None else None)
    except ValueError as error:
        raise ValueError(f"--load-debug-rollout-data: {error}") from error
