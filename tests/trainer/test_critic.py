"""PPO's critic: its values, GAE from them, and its training, at every layout."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import trainer_worker
from tests.trainer.test_weight_sets import LAYOUTS, critic_folder
from tests.trainer.trainer_worker import Samples, config_of

PPO = {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, "normalize_advantages": False}


def call(workers, layout, method, shards, *args):
    """Call a method with each rank's shard; what one rank of each data-parallel rank returned."""
    found = workers.call_each(
        method, [(*args[:1], shards[layout.dp_rank(rank)], *args[1:]) for rank in range(layout.world_size)]
    )
    return [found[layout.ranks_of_dp(dp)[0]] for dp in range(layout.dp)]


def columns(handed):
    """The columns that each data-parallel rank hands over, beside its metrics."""
    return [part for _, part in handed]


def gae_by_loops(rewards, values, mask, gamma, lam, truncated=False):
    """(advantages, returns) at trained tokens of one sample, by the recursion in float64."""
    trained = np.flatnonzero(mask)
    v = values[trained].astype(np.float64)
    r = np.zeros(trained.size)
    r[-1] = rewards
    advantages, following = np.zeros(trained.size), 0.0
    for t in reversed(range(trained.size)):
        after = v[-1] if truncated else 0.0
        delta = r[t] + gamma * (v[t + 1] if t + 1 < trained.size else after) - v[t]
        following = delta + gamma * lam * following
        advantages[t] = following
    return advantages, advantages + v


def test_values_to_advantages_to_a_trained_critic(workers, hf, tmp_path):
    folder, _ = hf("qwen3", False)
    critic_folder(tmp_path / "critic", "qwen3")
    samples = Samples(6, seed=71, share=2)
    layout = TrainerLayout(2)
    config = config_of(tmp_path / "critic", **PPO, lr=2e-3)
    workers.start(config, layout, role="critic")
    values = columns(call(workers, layout, "values", samples.shards(2, micro=2)))
    everything = {position: columns["values"] for part in values for position, columns in part.items()}
    assert sorted(everything) == list(range(6))

    # The actor has another layout: its ranks find their own samples' values.
    actor_layout = TrainerLayout(2, pp=2)
    workers.start(config_of(folder, **PPO), actor_layout)
    prepared = columns(call(workers, actor_layout, "prepare", samples.shards(1, micro=2), 0, values))
    (targets,) = prepared
    for i in range(6):
        trained = samples.mask[i] > 0
        _, returns = gae_by_loops(samples.rewards[i], everything[i], samples.mask[i], 0.95, 0.9)
        assert np.abs(targets[i]["returns"][trained] - returns).max() < 1e-5
        assert np.all(targets[i]["returns"][~trained] == 0)
    metrics = workers.train(samples.shards(1, micro=2), actor_layout, 0)
    wanted = [gae_by_loops(r, everything[i], samples.mask[i], 0.95, 0.9)[0] for i, r in enumerate(samples.rewards)]
    assert metrics["train/advantage_mean"] == pytest.approx(np.concatenate(wanted).mean(), abs=1e-5)

    errors = [targets[i]["returns"] - everything[i] for i in range(6)]
    masked = np.concatenate([error[mask > 0] for error, mask in zip(errors, samples.mask, strict=True)])
    reference = None
    for layout in LAYOUTS:
        workers.start(config, layout, role="critic")
        shards = samples.shards(layout.dp, micro=2)
        metrics = call(workers, layout, "train", shards, 0, prepared)[0]
        assert metrics["critic/loss"] == pytest.approx(0.5 * np.mean(masked.astype(np.float64) ** 2), rel=1e-5)
        assert metrics["critic/value_error"] == pytest.approx(np.abs(masked).mean(), rel=1e-5)
        assert "train/loss" not in metrics
        weights = workers.run(trainer_worker.weights)[0]
        if reference is None:
            reference = weights
        assert max(np.abs(weights[name] - tensor).max() for name, tensor in reference.items()) < 2e-5, layout
        again = columns(call(workers, layout, "values", shards))
        after = {position: found["values"] for part in again for position, found in part.items()}
        gap = np.concatenate([(after[i] - targets[i]["returns"])[samples.mask[i] > 0] for i in range(6)])
        assert np.mean(gap**2) < np.mean(masked**2), "a step brings the values nearer to the returns"


def test_a_response_cut_at_its_limit_is_worth_its_last_value(workers, hf):
    folder, _ = hf("llama", True)
    samples = Samples(4, seed=74)
    random = np.random.default_rng(74)
    values = {i: {"values": random.normal(size=n).astype(np.float32)} for i, n in enumerate(samples.response)}
    truncated = [True, False, True, False]
    (shard,) = samples.shards(1, micro=2)
    shard.fields["truncated"] = np.array(truncated)
    found = {}
    for bootstraps in (True, False):
        workers.start(config_of(folder, **PPO, bootstrap_truncated=bootstraps), TrainerLayout(1))
        (found[bootstraps],) = columns(call(workers, TrainerLayout(1), "prepare", [shard], 0, [values]))
        for i, cut in enumerate(truncated):
            given = (samples.rewards[i], values[i]["values"], samples.mask[i], 0.95, 0.9, cut and bootstraps)
            _, returns = gae_by_loops(*given)
            assert np.abs(found[bootstraps][i]["returns"][samples.mask[i] > 0] - returns).max() < 1e-5
    gaps = [np.abs(found[True][i]["returns"] - found[False][i]["returns"]).max() for i in range(4)]
    assert [gap > 0.01 for gap in gaps] == truncated
