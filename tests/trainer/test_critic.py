"""PPO's critic: its values, GAE from them, and its training, at every layout; and further sets of weights."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import hf_models, trainer_worker
from tests.trainer.test_parity import LAYOUTS, assert_close
from tests.trainer.trainer_worker import Samples, config_of
from tools.parity import checkpoint_gradients

PPO = {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, "normalize_advantages": False}


def call(workers, layout, method, shards, *args, rollout_id=0):
    """Call a method with each rank's shard; what one rank of each data-parallel rank returned."""
    found = workers.on_shards(method, shards, *args, rollout_id=rollout_id)
    return [found[layout.ranks_of_dp(dp)[0]] for dp in range(layout.dp)]


def columns(handed, name):
    """Position -> the column of that name, of what data-parallel ranks handed over besides metrics."""
    return {position: found[name] for _, part in handed for position, found in part.items()}


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
    hf_models.make_critic(tmp_path / "critic", "qwen3")
    samples, layout = Samples(6, seed=71, share=2), TrainerLayout(2)
    config = config_of(tmp_path / "critic", **PPO, lr=2e-3)
    workers.start(config, layout, role="critic")
    handed = call(workers, layout, "values", samples.shards(2, micro=2), rollout_id=None)
    values = columns(handed, "values")
    assert sorted(values) == list(range(6))

    # The actor has another layout: its ranks find their own samples' values.
    layout, shards = TrainerLayout(2, pp=2), samples.shards(1, micro=2)
    workers.start(config_of(hf("qwen3", False)[0], **PPO), layout)
    prepared = call(workers, layout, "prepare", shards, [part for _, part in handed])
    targets = columns(prepared, "returns")
    wanted = [gae_by_loops(samples.rewards[i], values[i], samples.mask[i], 0.95, 0.9) for i in range(6)]
    for i, (_, returns) in enumerate(wanted):
        trained = samples.mask[i] > 0
        assert np.abs(targets[i][trained] - returns).max() < 1e-5
        assert np.all(targets[i][~trained] == 0)
    mean = np.concatenate([advantages for advantages, _ in wanted]).mean()
    assert workers.train(shards)["train/advantage_mean"] == pytest.approx(mean, abs=1e-5)

    def errors(values):
        return np.concatenate([(targets[i] - values[i])[samples.mask[i] > 0].astype(np.float64) for i in range(6)])

    before, reference = errors(values), None
    for layout in LAYOUTS:
        workers.start(config, layout, role="critic")
        shards = samples.shards(layout.dp, micro=2)
        metrics = call(workers, layout, "train", shards, [part for _, part in prepared])[0]
        assert metrics["critic/loss"] == pytest.approx(0.5 * np.mean(before**2), rel=1e-5)
        assert metrics["critic/value_error"] == pytest.approx(np.abs(before).mean(), rel=1e-5)
        assert "train/loss" not in metrics
        weights = workers.run(trainer_worker.weights)[0]
        reference = reference or weights
        assert max(np.abs(weights[name] - tensor).max() for name, tensor in reference.items()) < 2e-5, layout
        after = columns(call(workers, layout, "values", shards, rollout_id=None), "values")
        assert np.mean(errors(after) ** 2) < np.mean(before**2), "a step brings the values nearer to the returns"


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
        workers.start(config_of(folder, **PPO, bootstrap_truncated=bootstraps))
        found[bootstraps] = columns(call(workers, TrainerLayout(1), "prepare", [shard], [values]), "returns")
        for i, cut in enumerate(truncated):
            given = (samples.rewards[i], values[i]["values"], samples.mask[i], 0.95, 0.9, cut and bootstraps)
            _, returns = gae_by_loops(*given)
            assert np.abs(found[bootstraps][i][samples.mask[i] > 0] - returns).max() < 1e-5
    gaps = [np.abs(found[True][i] - found[False][i]).max() for i in range(4)]
    assert [gap > 0.01 for gap in gaps] == truncated


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_values_and_their_gradients_equal_transformers(workers, tmp_path, family):
    model = hf_models.make_critic(tmp_path / "critic", family)
    samples = Samples(6, seed=21)
    with torch.no_grad():
        want = [hf_models.values_of(model, samples, i).numpy() for i in range(6)]
    loss = sum((hf_models.values_of(model, samples, i) ** 2).sum() for i in range(6))
    loss.backward()
    gradients = checkpoint_gradients(model)
    layouts = LAYOUTS if family == "qwen3" else [TrainerLayout(2, tp=2, etp=2), TrainerLayout(2, ep=2)]
    for layout in layouts:
        workers.start(config_of(tmp_path / "critic"), layout, role="critic")
        got = workers.call("score", samples.shards()[0])
        for rank in got:
            assert np.abs(np.concatenate(rank) - np.concatenate(want)).max() <= 1e-5, layout
        workers.on_shards(trainer_worker.train_on_squares, samples.shards(layout.dp))
        assert_close(workers.run(trainer_worker.gradients)[0], gradients, 1e-4)


def test_a_critic_starts_from_a_policy_and_is_saved(workers, hf, tmp_path):
    """Its head starts as zeros; what is saved has it under transformers' name, and a checkpoint holds it."""
    layout = TrainerLayout(2, tp=2)
    workers.start(config_of(hf("qwen2", True)[0]), layout, role="critic")
    (shard,) = Samples(4, seed=2).shards()
    assert all(not np.any(values) for values in workers.call("score", shard)[0])
    workers.run(trainer_worker.set_head, 0.25)
    values = workers.call("score", shard)[0]
    assert all(np.all(one) for one in values)
    workers.call("save", str(tmp_path / "checkpoint"), 0)
    workers.call("save_hf", str(tmp_path / "critic"))
    workers.run(trainer_worker.set_head, 0.0)
    workers.call("load", str(tmp_path / "checkpoint"))
    np.testing.assert_equal(workers.call("score", shard)[0], values)
    workers.start(config_of(tmp_path / "critic"), layout, role="critic")
    np.testing.assert_equal(workers.call("score", shard)[0], values)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", num_labels=1)
    assert torch.equal(model.score.weight, torch.full((1, model.config.hidden_size), 0.25))


@pytest.mark.parametrize("layout", [TrainerLayout(1), TrainerLayout(2, pp=2)], ids=str)
def test_several_sets_of_weights(workers, hf, layout):
    """Reference, teacher and an older policy, each scored by the same model; what is trained stays bit by bit."""
    teacher, teacher_model = hf("qwen3", True, seed=11)
    samples = Samples(6, seed=7)
    (shard,) = samples.shards()
    workers.start(config_of(hf("qwen3", True)[0]), layout)
    workers.call("read_weights", "teacher", str(teacher), "--teacher-load")
    workers.call("keep_weights", "start")
    at_start = workers.call("score", shard)[0]
    history = []
    for step in range(2):
        workers.train(samples.shards(), layout, step)
        workers.call("keep_weights", "old_actor")
        history.append(workers.call("score", shard)[0])
    before = workers.call("state_hashes")
    assert all(map(np.array_equal, workers.call("score", shard, "start")[0], at_start))
    assert all(map(np.array_equal, workers.call("score", shard, "old_actor")[0], history[1]))
    scores = np.concatenate(workers.call("score", shard, "teacher")[0])
    assert np.abs(scores - hf_models.all_log_probs(teacher_model, samples)).max() <= 1e-5
    assert workers.call("state_hashes") == before
    assert all(map(np.array_equal, workers.call("score", shard)[0], history[1]))
    assert not all(map(np.array_equal, history[0], history[1]))
