"""Check that every token of an evaluation was sampled by one version of the weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusionrl.data.sample import Sample
from fusionrl.data.token_versions import UNKNOWN_VERSION, as_version, split_versions
from fusionrl.rollout.types import EvalResult


class MixedVersions(RuntimeError):
    """An evaluation has tokens of several versions of the weights, or of another one than the engines were pushed."""


def check_one_version(data: Mapping[str, EvalResult], pushed: int | None, step: int) -> int | None:
    """Return the version of the weights that sampled all tokens of an evaluation; None: unknown.

    pushed  the version that its engines have; None: nothing was pushed to them

    Raises:
        MixedVersions: names both versions, and a sample of each.
    """
    first: tuple[int, str] | None = None if pushed is None else (pushed, "the engines were pushed")
    for name, result in data.items():
        for sample in result.get("samples") or []:
            for version in known_versions(sample):
                where = f"sample {sample.index} of set {name} has tokens of"
                if first is None:
                    first = version, where
                elif version != first[0]:
                    raise MixedVersions(
                        f"the evaluation after step {step} would mix two versions of the weights: {first[1]} version"
                        f" {first[0]}, and {where} version {version}"
                    )
    return None if first is None else first[0]


def known_versions(sample: Sample) -> list[int]:
    """Return the known versions of the weights that sampled its tokens, each once."""
    tokens, turns = split_versions(vars(sample)["weight_versions"])
    distinct = {int(version) for version in np.unique(np.asarray(tokens, np.int64))}
    return sorted((distinct | {as_version(turn) for turn in turns}) - {UNKNOWN_VERSION})
