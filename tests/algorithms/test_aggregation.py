"""Weights of tokens: the sums that the papers write, for samples of any masks."""

import numpy as np
import pytest

from fusionrl.algorithms.policy_losses import token_weights

# One plain, one with a tool's answer in it, one without a trained token, one empty, one cut off.
MASKS = [[1, 1, 1], [1, 0, 0, 1, 1], [0, 0], [], [1] * 8]
NUM_TOKENS = 14.0
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_sum_of_weighted_losses(kind: str):
    random = np.random.default_rng(0)
    losses = [random.normal(size=len(mask)) for mask in MASKS]
    got = sum(
        float(token_weights(np.array(mask, np.float32), kind, NUM_TOKENS, len(MASKS), 8.0) @ loss)
        for mask, loss in zip(MASKS, losses, strict=True)
    )
    trained = [[x for x, m in zip(loss, mask, strict=True) if m] for loss, mask in zip(losses, MASKS, strict=True)]
    want = {
        "token_mean": sum(map(sum, trained)) / 14,
        "sequence_mean": sum(sum(own) / len(own) for own in trained if own) / 5,
        "constant": sum(map(sum, trained)) / (5 * 8),
    }
    assert got == pytest.approx(want[kind], rel=1e-12)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_step_without_trained_tokens_weighs_nothing(kind: str):
    assert token_weights(np.zeros(3), kind, 0.0, 0, 8.0).tolist() == [0.0, 0.0, 0.0]
