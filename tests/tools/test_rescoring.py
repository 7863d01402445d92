"""The re-scorer of tools/pipeline_matrix.py: one changed log-prob, wrong version or token that is too old is found."""

from collections.abc import Callable
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


@pytest.fixture(scope="module")
def checked(weights: dict[int, Path]) -> Callable[..., Rescored]:
    """checked(*samples, **options) -> what the re-scorer says of them."""
    return lambda *samples, **options: rescore(samples, weights, **{"max_staleness": 1, **options})


def test_true_samples_pass(samples: list[SavedSample], checked: Callable[..., Rescored]) -> None:
    result = checked(*samples)
    assert result.faults == [] and result.largest_gap < 1e-5
    assert (result.samples, result.tokens, result.spanning) == (3, 3 * LENGTH - 2, 2)
    assert (result.stale_tokens, result.max_staleness, result.unchecked) == (7 + 4, 1, 0)
    assert result.other_version > 0.1  # the versions are told apart


def test_one_changed_log_prob_is_found(samples: list[SavedSample], checked: Callable[..., Rescored]) -> None:
    changed = samples[0].log_probs.copy()
    changed[3] += 2e-4
    (fault,) = checked(replace(samples[0], log_probs=changed), *samples[1:]).faults
    assert fault.startswith("line 0: token 3 of version 1")
    changed[3] = np.nan
    result = checked(replace(samples[0], log_probs=changed))
    assert len(result.faults) == 1 and result.largest_gap == np.inf


@pytest.mark.parametrize(
    ("line", "token", "version", "said"),
    [
        (1, 6, 1, "line 1: token 6 of version 1"),  # the last token of version 0
        (0, 0, -1, "line 0: claims version -1, which no engine had"),
        (0, 0, 9, "line 0: claims version 9, which no engine had"),
    ],
)
def test_one_wrong_version_is_found(
    samples: list[SavedSample], checked: Callable[..., Rescored], line: int, token: int, version: int, said: str
) -> None:
    versions = samples[line].versions.copy()
    versions[token] = version
    faults = checked(replace(samples[line], versions=versions), max_staleness=9).faults
    assert any(fault.startswith(said) for fault in faults)


def test_a_kept_cache_is_compared_up_to_the_push(samples: list[SavedSample], checked: Callable[..., Rescored]) -> None:
    changed = samples[1].log_probs.copy()
    changed[7:] += 0.01  # keys and values of version 0 stay
    kept = replace(samples[1], log_probs=changed)
    assert len(checked(kept).faults) == LENGTH - 7
    result = checked(kept, keeps_cache=True)
    assert result.faults == [] and result.unchecked == LENGTH - 7
