"""Removed and masked samples in the loss's denominators: the papers' formulas, by loops in float64."""

from collections.abc import Sequence

import numpy as np
import pytest

from fusionrl.algorithms.policy_losses import token_weights
from fusionrl.data.sample import Sample
from fusionrl.plan.balance import Balance, BatchPlan
from fusionrl.plan.costs import SequenceCost
from tests.plan.shards import build_shards

GROUPS, SIZE, LONGEST = 16, 4, 12
REMOVED, MASKED, FAILED = {3, 17, 40}, {5, 6}, {21, 22, 63}


def rollout(removed: set[int] = REMOVED, masked: set[int] = MASKED, failed: set[int] = FAILED) -> list[Sample]:
    """64 samples of one optimizer step with masks of tools' tokens, of which some train nothing."""
    random = np.random.default_rng(7)
    samples = []
    for index in range(GROUPS * SIZE):
        length = int(random.integers(1, LONGEST + 1))
        mask = [1] + random.integers(0, 2, length - 1).tolist()
        sample = Sample(index=index, group_index=index // SIZE, tokens=[1] * (3 + length), response_length=length)
        sample.loss_mask = [0] * length if index in masked else mask
        sample.remove_sample = index in removed
        sample.status = Sample.Status.FAILED if index in failed else Sample.Status.COMPLETED
        samples.append(sample)
    return samples


def token_losses(samples: Sequence[Sample]) -> list[np.ndarray]:
    """Each token's loss: as an unclipped step has it, minus its advantage, here any number."""
    random = np.random.default_rng(8)
    return [random.normal(size=LONGEST)[: sample.response_length] for sample in samples]


def loss_by_shards(samples: list[Sample], kind: str, dp_size: int, micro_batch_size: int) -> float:
    """The loss as the trainers add it up: over ranks, micro-batches and tokens, by the counts of the shards."""
    losses = token_losses(samples)
    rewards = [0.0] * len(samples)
    balance = Balance(SequenceCost(linear=1.0, quadratic=0.0), 200, micro_batch_size)
    plan = BatchPlan(len(samples), 1, 1, len(samples), dp_size)
    total = 0.0
    for shard in build_shards(samples, rewards, rewards, plan, balance, rollout_id=0):
        masks, index = shard.split("loss_mask"), shard.fields["sample_index"]
        (step,) = shard.steps
        for members in step.micro_batches:
            for i in members:
                weights = token_weights(masks[i], kind, step.num_tokens, step.num_samples, LONGEST)
                total += float(weights @ losses[index[i]])
    return total


def trained_tokens(sample: Sample) -> list[int]:
    """Positions in the response; none of a sample that was removed or failed."""
    if sample.remove_sample or sample.status == Sample.Status.FAILED:
        return []
    return [t for t, m in enumerate(sample.loss_mask or []) if m]


def grpo(samples: Sequence[Sample], losses: Sequence[np.ndarray]) -> float:
    """2402.03300, equation 3: the mean over prompts of 1/G sum_i 1/|o_i| sum_t."""
    total = 0.0
    for group in range(GROUPS):
        for i in range(group * SIZE, (group + 1) * SIZE):
            tokens = trained_tokens(samples[i])
            total += sum(losses[i][t] for t in tokens) / len(tokens) / SIZE if tokens else 0.0
    return total / GROUPS


def dr_grpo(samples: Sequence[Sample], losses: Sequence[np.ndarray]) -> float:
    """2503.20783, section 3.2: the mean over prompts of 1/G sum_i 1/L sum_t, L the same for all."""
    total = 0.0
    for group in range(GROUPS):
        members = range(group * SIZE, (group + 1) * SIZE)
        total += sum(losses[i][t] / LONGEST for i in members for t in trained_tokens(samples[i])) / SIZE
    return total / GROUPS


def dapo(samples: Sequence[Sample], losses: Sequence[np.ndarray]) -> float:
    """2503.14476, section 3.3: one mean over all tokens that the loss sees."""
    seen = [losses[i][t] for i in range(len(samples)) for t in trained_tokens(samples[i])]
    return sum(seen) / len(seen)


PAPERS = {"sequence_mean": grpo, "constant": dr_grpo, "token_mean": dapo}


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 64), (1, 5), (4, 3), (3, 1)])
@pytest.mark.parametrize("kind", PAPERS)
def test_the_loss_is_the_papers_at_every_split(kind: str, dp_size: int, micro_batch_size: int) -> None:
    samples = rollout()
    want = PAPERS[kind](samples, token_losses(samples))
    assert abs(want) > 1e-3
    assert loss_by_shards(samples, kind, dp_size, micro_batch_size) == pytest.approx(want, rel=1e-9)
