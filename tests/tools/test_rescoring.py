"""The re-scorer of tools/pipeline_matrix.py: one changed log-prob, wrong version or token that is too old is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_model import make_tiny_qwen3
from tools.rescoring import Rescored, SavedSample, load_model, rescore, response_log_probs

PROMPT, LENGTH = 5, 12


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Three versions of the weights."""
    folder = tmp_path_factory.mktemp("versions")
    return {version: make_tiny_qwen3(folder / str(version), seed=version, num_layers=1) for version in range(3)}


@pytest.fixture(scope="module")
def samples(weights: dict[int, Path]) -> list[SavedSample]:
    """Of version 1, of versions 0 and 1, and of an agent whose tool said tokens 4 and 5; all trained version 1."""
    generator = np.random.default_rng(0)
    claims = [[1] * LENGTH, [0] * 7 + [1] * (LENGTH - 7), [0] * 6 + [1] * (LENGTH - 6)]
    found = []
    for number, versions in enumerate(claims):
        tokens = generator.integers(0, 500, PROMPT + LENGTH + number).tolist()
        by_version = [response_log_probs(load_model(weights[v]), [(tokens, LENGTH)])[0] for v in (0, 1)]
        log_probs = np.where(np.array(versions) == 0, by_version[0], by_version[1])
        mask = np.ones(LENGTH, int)
        if number == 2:
            mask[4:6], log_probs[4:6] = 0, 0.0
        found.append(SavedSample(f"line {number}", 1, tokens, log_probs, np.array(versions), mask))
    return found


def checked(samples: list[SavedSample], weights: dict[int, Path], **options: bool | int) -> Rescored:
    return rescore(samples, weights, **{"max_staleness": 1, **options})  # type: ignore[arg-type]


def test_true_samples_pass(samples: list[SavedSample], weights: dict[int, Path]) -> None:
    result = checked(samples, weights)
    assert result.faults == [] and result.largest_gap < 1e-5
    assert (result.samples, result.tokens, result.spanning) == (3, 3 * LENGTH - 2, 2)
    assert (result.stale_tokens, result.max_staleness, result.unchecked) == (7 + 4, 1, 0)
    assert result.other_version > 0.1  # the versions are told apart


def test_one_changed_log_prob_is_found(samples: list[SavedSample], weights: dict[int, Path]) -> None:
    changed = samples[0].log_probs.copy()
    changed[3] += 2e-4
    (fault,) = checked([replace(samples[0], log_probs=changed), *samples[1:]], weights).faults
    assert fault.startswith("line 0: token 3 of version 1")
    changed[3] = np.nan
    result = checked([replace(samples[0], log_probs=changed)], weights)
    assert len(result.faults) == 1 and result.largest_gap == np.inf


def test_one_wrong_version_is_found(samples: list[SavedSample], weights: dict[int, Path]) -> None:
    versions = samples[1].versions.copy()
    versions[6] = 1  # the last token of version 0
    (fault,) = checked([replace(samples[1], versions=versions)], weights).faults
    assert fault.startswith("line 1: token 6 of version 1")


@pytest.mark.parametrize("version", [-1, 9])
def test_a_version_that_no_engine_had_is_found(
    samples: list[SavedSample], weights: dict[int, Path], version: int
) -> None:
    versions = samples[0].versions.copy()
    versions[0] = version
    faults = checked([replace(samples[0], versions=versions)], weights, max_staleness=9).faults
    assert f"line 0: claims version {version}, which no engine had" in faults


def test_a_token_that_is_too_old_is_found(samples: list[SavedSample], weights: dict[int, Path]) -> None:
    late = [replace(sample, trained_by=2) for sample in samples]
    result = checked(late, weights)
    assert result.max_staleness == 2 and len(result.faults) == 2
    assert "a token of version 0 trained version 2" in result.faults[0]
    assert checked(late, weights, max_staleness=2).faults == []
    assert checked(late, weights, fetches_per_push=2).faults == []  # a version of two rollouts


def test_a_kept_cache_is_compared_up_to_the_push(samples: list[SavedSample], weights: dict[int, Path]) -> None:
    changed = samples[1].log_probs.copy()
    changed[7:] += 0.01  # keys and values of version 0 stay
    kept = [replace(samples[1], log_probs=changed)]
    assert len(checked(kept, weights).faults) == LENGTH - 7
    result = checked(kept, weights, keeps_cache=True)
    assert result.faults == [] and result.unchecked == LENGTH - 7
