"""How old samples are: the versions of the weights that sampled their tokens, and the bound on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusionrl.config.hooks import HookError
from fusionrl.data.prompt_copy import prompt_of
from fusionrl.data.sample import Sample, response_mask
from fusionrl.data.token_versions import UNKNOWN_VERSION
from fusionrl.pipeline.knobs import Knobs


def oldest_version(samples: Sequence[Sample], fetches_per_push: int) -> int | None:
    """Return the controller's version of the oldest token that is trained; None where none is known."""
    oldest = [versions.min() for sample in samples if len(versions := trained_versions(sample))]
    return int(min(oldest)) // fetches_per_push if oldest else None


def trained_versions(sample: Sample) -> np.ndarray:
    """[n] versions of the tokens of a sample that are trained on, those that are known."""
    if sample.weight_versions is None:
        return np.zeros(0, np.int64)
    versions = np.asarray(sample.weight_versions, np.int64)[response_mask(sample) > 0]
    return versions[versions != UNKNOWN_VERSION]


def without_answer(sample: Sample) -> Sample:
    """Return the sample as its prompt came, where it has an answer: one that another run left, of older weights."""
    if not sample.response_length:
        return sample
    blank = prompt_of(sample)
    blank.index, blank.session_id = sample.index, sample.session_id
    return blank


def check_not_older(samples: Sequence[Sample], born: int) -> None:
    """Refuse tokens of weights from before the group was begun, by version `born`.

    Raises:
        HookError: names the sample; a function has put them into it.
    """
    for sample in samples:
        versions = trained_versions(sample)
        if len(versions) and versions.min() < born:
            raise HookError(
                f"--max-staleness: sample {sample.index} has a token of version {versions.min()}, but its prompt was"
                f" begun under version {born}; a function must bring tokens of now",
                [sample],
            )


def check_bound(groups: Sequence[Sequence[Sample]], version: int, knobs: Knobs) -> None:
    """Hold every sample and token that is about to be trained to --max-staleness.

    Raises:
        HookError: names the sample; a function has put tokens of older weights into it.
    """
    for sample in (sample for group in groups for sample in group):
        versions = trained_versions(sample)
        if (
            len(versions)
            and version // knobs.fetches_per_push - versions.min() // knobs.fetches_per_push > knobs.max_staleness
        ):
            raise HookError(
                f"--max-staleness {knobs.max_staleness}: sample {sample.index} has a token of version"
                f" {versions.min()}, and version {version} would train it",
                [sample],
            )
