"""DPO against its formula in a loop. How its gradient reaches tokens on any rank: test_losses.py of the trainer."""

import math

import pytest

from fusionrl.algorithms.dpo import pair_slopes


def pair_loss(h: float, beta: float, smoothing: float) -> float:
    def log_sigmoid(x: float) -> float:
        return -math.log(1 + math.exp(-x))

    return -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)


# (pair, sign, log ratio), in no order; the pairs are 3, 8, 1 and 5.
ANSWERS = [(3, 1.0, 0.9), (8, -1.0, -2.0), (1, 1.0, 0.2), (3, -1.0, 1.4), (5, -1.0, 0.3), (8, 1.0, 1.5), (1, -1.0, 0.2)]
ANSWERS.append((5, 1.0, -0.7))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_slopes_are_those_of_the_loss(smoothing: float):
    slopes, means = pair_slopes(ANSWERS, 0.3, smoothing)
    ratio = {(pair, sign): total for pair, sign, total in ANSWERS}
    total = 0.0
    for pair in (1, 3, 5, 8):
        h = ratio[pair, 1.0] - ratio[pair, -1.0]
        total += pair_loss(h, 0.3, smoothing) / 4
        slope = 0.3 * (1 / (1 + math.exp(-0.3 * h)) - (1 - smoothing))
        assert slopes[pair] == pytest.approx(slope, rel=1e-12)
        steps = [pair_loss(h + step, 0.3, smoothing) for step in (1e-5, -1e-5)]
        assert slopes[pair] == pytest.approx((steps[0] - steps[1]) / 2e-5, rel=1e-8)
    assert means == {
        "num_pairs": 4.0,
        "pairs_excluded": 0.0,
        "dpo_loss": pytest.approx(total, rel=1e-12),
        "chosen_reward": pytest.approx(0.3 * (0.9 + 0.2 - 0.7 + 1.5) / 4),
        "rejected_reward": pytest.approx(0.3 * (1.4 + 0.2 + 0.3 - 2.0) / 4),
        "reward_margin": pytest.approx(0.3 * (-0.5 + 0.0 - 1.0 + 3.5) / 4),
        "reward_accuracy": 0.25,
    }


def test_no_order_and_no_other_pair_changes_a_slope():
    slopes, _ = pair_slopes(ANSWERS, 0.3, 0.1)
    assert pair_slopes(reversed(ANSWERS), 0.3, 0.1)[0] == slopes
    for pair, slope in slopes.items():
        assert pair_slopes([entry for entry in ANSWERS if entry[0] == pair], 0.3, 0.1)[0] == {pair: slope}


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf, math.inf])
def test_a_pair_that_cannot_be_compared_is_left_out_and_counted(bad: float | None):
    broken = [a for a in ANSWERS if a[:2] != (3, -1.0)] + ([] if bad is None else [(3, -1.0, bad)])
    slopes, means = pair_slopes(broken, 0.3, 0.1)
    want, of_others = pair_slopes([a for a in ANSWERS if a[0] != 3], 0.3, 0.1)
    assert slopes == want and 3 not in slopes
    assert means == of_others | {"pairs_excluded": 1.0}
    assert pair_slopes(broken[-1:], 0.3, 0.1) == ({}, {"num_pairs": 0.0, "pairs_excluded": 1.0})
    assert pair_slopes([], 0.3, 0.1) == ({}, {"num_pairs": 0.0, "pairs_excluded": 0.0})


def test_two_answers_of_one_sign_are_refused():
    with pytest.raises(ValueError, match=r"pair 3 has two answers of sign -1; a pair is one chosen and one"):
        pair_slopes([*ANSWERS, (3, -1.0, 0.0)], 0.3, 0.0)
