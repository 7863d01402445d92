"""PRIME: the reward model's training on outcomes, and the advantages from its rewards, at every layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fusionrl.plan.critic import auxiliary_config
from fusionrl.plan.layout import TrainerLayout
from tests.trainer import trainer_worker
from tests.trainer.hf_models import clone, response_log_probs
from tests.trainer.test_critic import call
from tests.trainer.test_parity import assert_close
from tests.trainer.test_weight_sets import LAYOUTS
from tests.trainer.trainer_worker import Samples, config_of
from tools.parity import checkpoint_gradients

GROUP = 3
BETA = 0.3
PRIME = {
    "advantage_estimator": "prime",
    "prm_beta": BETA,
    "prm_process_coef": 2.0,
    "prm_outcome_coef": 3.0,
    "gamma": 0.9,
    "rollout_temperature": 0.7,  # the reward model samples nothing: its log-probs have temperature 1
}


def samples_of(seed: int) -> Samples:
    """Groups of three, which span the ranks; nothing of one sample is trained on."""
    samples = Samples(8, seed=seed, share=GROUP)
    samples.mask[4][:] = 0.0
    return samples


def in_float64(model, weights=None):
    """The transformers model in float64, with exported weights where given."""
    model = clone(model).double()
    if weights is not None:
        model.load_state_dict({name: torch.from_numpy(w).double() for name, w in weights.items()})
    return model


def implicit(model, reference, samples: Samples) -> list[torch.Tensor]:
    """BETA (log p - log p_ref) of each response token, 0 where it is not trained on; with the model's gradient."""
    rewards = []
    for i in range(len(samples)):
        with torch.no_grad():
            before, _ = response_log_probs(reference, samples, i)
        after, _ = response_log_probs(model, samples, i)
        rewards.append(BETA * (after - before) * torch.tensor(samples.mask[i]).double())
    return rewards


def by_position(parts, name: str) -> dict[int, np.ndarray]:
    return {position: columns[name] for part in parts for position, columns in part.items()}


def test_it_learns_outcomes_against_its_starting_weights_and_then_rewards_tokens(workers, hf):
    folder, model = hf("qwen3", False)
    samples, trained = samples_of(81), [0, 1, 2, 3, 5, 6, 7]
    labels = samples.rewards > 0
    share = labels[trained].mean()
    assert 0 < share < 1
    start = in_float64(model)
    config = auxiliary_config(config_of(folder, **PRIME, prm_lr=5e-3), "prm")
    first = None
    for layout in LAYOUTS:
        workers.start(config, layout, "prm")
        shards = samples.shards(layout.dp, micro=2)
        ((metrics, _), *_) = call(workers, layout, "process_rewards", shards, 0)
        # The model is its own reference yet: every reward is 0, and that says nothing.
        assert metrics["prm/loss"] == pytest.approx(math.log(2) * 7 / 8, rel=1e-6)
        assert metrics["prm/accuracy"] == pytest.approx(1 - share)
        assert metrics["prm/outcome"] == pytest.approx(share)
        weights = workers.run(trainer_worker.weights)[0]
        first = first or weights
        assert max(np.abs(weights[name] - tensor).max() for name, tensor in first.items()) < 2e-5, layout

        prm = in_float64(model, weights)
        rewards = implicit(prm, start, samples)
        losses, right = [], []
        for i in trained:
            chance = torch.sigmoid(rewards[i].sum())
            losses.append(-(chance if labels[i] else 1 - chance).log())
            right.append(bool(chance > 0.5) == labels[i])
        loss = sum(losses) / len(samples)  # the one without a trained token counts
        loss.backward()
        found = call(workers, layout, "process_rewards", shards, 1)
        metrics = found[0][0]
        assert metrics["prm/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["prm/accuracy"] == pytest.approx(np.mean(right))
        assert metrics["prm/implicit_reward"] == pytest.approx(
            float(sum(rewards[i].detach().sum() for i in trained)) / len(trained), rel=1e-4
        )
        assert metrics["prm/loss"] < math.log(2) * 7 / 8, "a step makes the outcomes likelier"
        assert metrics["prm/num_samples"] == 8 and metrics["prm/masked_samples"] == 1
        assert metrics["prm/excluded"] == 0 and metrics["prm/lr"] == 5e-3
        assert "train/loss" not in metrics
        assert_close(workers.run(trainer_worker.gradients)[0], checkpoint_gradients(prm), 1e-4)

        after = in_float64(model, workers.run(trainer_worker.weights)[0])
        with torch.no_grad():
            wanted = implicit(after, start, samples)
        got = by_position((columns for _, columns in found), "process_rewards")
        assert sorted(got) == list(range(8))
        for i, reward in enumerate(wanted):
            assert np.abs(got[i] - reward.numpy()).max() < 2e-6, (layout, i)


def advantages_by_loops(process: dict[int, np.ndarray], samples: Samples) -> np.ndarray:
    """The whitened advantages of all trained tokens, sample after sample, in float64."""
    means = {i: float(process[i][samples.mask[i] > 0].mean()) for i in range(len(samples)) if samples.mask[i].any()}
    found = []
    for i in means:
        others = [mean for j, mean in means.items() if j // GROUP == i // GROUP and j != i] or [means[i]]
        back: list[float] = []
        for reward in process[i][samples.mask[i] > 0][::-1].astype(np.float64):
            back.append(reward - sum(others) / len(others) + 0.9 * (back[-1] if back else 0.0))
        found += [2.0 * process_part + 3.0 * float(samples.rewards[i]) for process_part in back[::-1]]
    flat = np.array(found)
    return (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)


def advantages_of(actor, shard, columns):
    """Advantages as `train` makes them of the shard and the columns."""
    from fusionrl.trainer.sample_columns import columns_of
    from fusionrl.trainer.shard_pull import pull

    return columns_of(actor._prepare(1, pull(shard, columns)).shard, ("advantages",))


def columns_from(samples: Samples, seed: int) -> list[dict]:
    """Random process rewards, as two ranks of the reward model would give them."""
    random = np.random.default_rng(seed)
    drawn = {i: random.normal(size=n).astype(np.float32) * samples.mask[i] for i, n in enumerate(samples.response)}
    return [{i: {"process_rewards": drawn[i]} for i in range(rank, len(samples), 2)} for rank in (0, 1)]


def test_advantages_have_baselines_over_groups_that_span_ranks(workers, hf):
    folder, _ = hf("llama", True)
    samples = samples_of(82)
    columns = columns_from(samples, 83)
    wanted = advantages_by_loops(by_position(columns, "process_rewards"), samples)
    norm = None
    for layout in (TrainerLayout(1), TrainerLayout(2), TrainerLayout(2, pp=2), TrainerLayout(2, cp=2)):
        workers.start(config_of(folder, **PRIME), layout)
        shards = samples.shards(layout.dp, micro=2)
        ranks = [shards[layout.dp_rank(rank)] for rank in range(layout.world_size)]
        parts = workers.run_each([(advantages_of, shard, columns) for shard in ranks])
        got = by_position(parts, "advantages")
        flat = np.concatenate([got[i][samples.mask[i] > 0] for i in range(8)])
        assert np.abs(flat - wanted).max() < 1e-5, layout
        assert all(np.all(got[i][samples.mask[i] == 0] == 0) for i in range(8))
        metrics = call(workers, layout, "train", shards, 0, columns)[0]
        norm = norm or metrics["train/grad_norm"]
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 1e-3


def test_samples_of_no_group_are_alone(workers, hf):
    """Their process rewards are measured against their own mean, not against each other."""
    folder, _ = hf("llama", True)
    samples = Samples(3, seed=84)
    process = {i: {"process_rewards": np.full(n, i + 1, np.float32)} for i, n in enumerate(samples.response)}
    (shard,) = samples.shards(1, micro=2)
    shard.fields |= {"group_index": np.full(3, -1), "rewards": np.zeros(3, np.float32)}
    workers.start(config_of(folder, **PRIME), TrainerLayout(1))
    (found,) = workers.run(advantages_of, shard, [process])
    assert all(np.all(columns["advantages"] == 0) for columns in found.values())


def test_a_resumed_one_is_measured_against_its_first_weights(workers, hf, tmp_path):
    folder, _ = hf("llama", True)
    config, layout = auxiliary_config(config_of(folder, **PRIME, prm_lr=5e-3), "prm"), TrainerLayout(2, pp=2)
    shards = samples_of(86).shards(1, micro=2)
    workers.start(config, layout, "prm")
    call(workers, layout, "process_rewards", shards, 0)
    workers.call("save", str(tmp_path / "prm"), 0)
    ((metrics, columns),) = call(workers, layout, "process_rewards", shards, 1)
    assert metrics["prm/implicit_reward"] != 0
    workers.start(config, layout, "prm")
    workers.call("load", str(tmp_path / "prm"))
    ((again, same),) = call(workers, layout, "process_rewards", shards, 1)
    assert again == metrics
    assert all(np.array_equal(same[i]["process_rewards"], columns[i]["process_rewards"]) for i in range(8))
