"""PRIME: the reward model's training on outcomes, and the advantages from its rewards, at every layout."""

import math
from collections import ChainMap

import numpy as np
import pytest
import torch

from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import auxiliary_config
from tests.trainer import trainer_worker
from tests.trainer.hf_models import clone, response_log_probs
from tests.trainer.test_critic import call, columns
from tests.trainer.test_parity import LAYOUTS, assert_close
from tests.trainer.trainer_worker import Samples, config_of
from tools.parity import checkpoint_gradients

GROUP, BETA = 3, 0.3
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
        ((metrics, _), *_) = call(workers, layout, "process_rewards", shards)
        # The model is its own reference yet: every reward is 0, and that says nothing.
        assert metrics["prm/loss"] == pytest.approx(math.log(2) * 7 / 8, rel=1e-6)
        assert metrics["prm/accuracy"] == pytest.approx(1 - share)
        assert metrics["prm/outcome"] == pytest.approx(share)
        weights = workers.run(trainer_worker.weights)[0]
        first = first or weights
        assert max(np.abs(weights[name] - tensor).max() for name, tensor in first.items()) < 2e-5, layout

        prm = in_float64(model, weights)
        rewards = implicit(prm, start, samples)
        sums = torch.stack([rewards[i].sum() for i in trained])
        signs = torch.from_numpy(np.where(labels[trained], 1.0, -1.0))
        loss = -torch.nn.functional.logsigmoid(signs * sums).sum() / len(samples)  # the one that is masked counts
        loss.backward()
        found = call(workers, layout, "process_rewards", shards, rollout_id=1)
        metrics, sums = found[0][0], sums.detach()
        assert metrics["prm/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["prm/accuracy"] == pytest.approx(float((sums * signs > 0).double().mean()))
        assert metrics["prm/implicit_reward"] == pytest.approx(float(sums.mean()), rel=1e-4)
        assert metrics["prm/loss"] < math.log(2) * 7 / 8, "a step makes the outcomes likelier"
        counts = {"prm/num_samples": 8, "prm/masked_samples": 1, "prm/excluded": 0, "prm/lr": 5e-3}
        assert {name: metrics[name] for name in counts} == counts
        assert "train/loss" not in metrics
        assert_close(workers.run(trainer_worker.gradients)[0], checkpoint_gradients(prm), 1e-4)

        after = in_float64(model, workers.run(trainer_worker.weights)[0])
        with torch.no_grad():
            wanted = implicit(after, start, samples)
        got = columns(found, "process_rewards")
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


def test_advantages_have_baselines_over_groups_that_span_ranks(workers, hf):
    folder, _ = hf("llama", True)
    samples, random = samples_of(82), np.random.default_rng(83)
    process = {i: random.normal(size=n).astype(np.float32) * samples.mask[i] for i, n in enumerate(samples.response)}
    given = [{i: {"process_rewards": process[i]} for i in range(rank, 8, 2)} for rank in (0, 1)]
    wanted = advantages_by_loops(process, samples)
    norm = None
    for layout in (TrainerLayout(1), TrainerLayout(2), TrainerLayout(2, pp=2), TrainerLayout(2, cp=2)):
        workers.start(config_of(folder, **PRIME), layout)
        shards = samples.shards(layout.dp, micro=2)
        got = ChainMap(*(part for part, _, _ in workers.on_shards(trainer_worker.advantages, shards, given)))
        flat = np.concatenate([got[i][samples.mask[i] > 0] for i in range(8)])
        assert np.abs(flat - wanted).max() < 1e-5, layout
        assert all(np.all(got[i][samples.mask[i] == 0] == 0) for i in range(8))
        metrics = call(workers, layout, "train", shards, given)[0]
        norm = norm or metrics["train/grad_norm"]
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 1e-3


def test_samples_of_no_group_are_alone(workers, hf):
    """Their process rewards are measured against their own mean, not against each other."""
    samples = Samples(3, seed=84)
    process = {i: {"process_rewards": np.full(n, i + 1, np.float32)} for i, n in enumerate(samples.response)}
    (shard,) = samples.shards(1, micro=2)
    shard.fields |= {"group_index": np.full(3, -1), "rewards": np.zeros(3, np.float32)}
    workers.start(config_of(hf("llama", True)[0], **PRIME), TrainerLayout(1))
    assert not workers.run(trainer_worker.advantages, shard, [process])[0][1].any()


def test_a_resumed_one_is_measured_against_its_first_weights(workers, hf, tmp_path):
    folder, _ = hf("llama", True)
    config, layout = auxiliary_config(config_of(folder, **PRIME, prm_lr=5e-3), "prm"), TrainerLayout(2, pp=2)
    shards = samples_of(86).shards(1, micro=2)
    workers.start(config, layout, "prm")
    call(workers, layout, "process_rewards", shards)
    workers.call("save", str(tmp_path / "prm"), 0)
    (before,) = call(workers, layout, "process_rewards", shards, rollout_id=1)
    assert before[0]["prm/implicit_reward"] != 0
    workers.start(config, layout, "prm")
    workers.call("load", str(tmp_path / "prm"))
    (after,) = call(workers, layout, "process_rewards", shards, rollout_id=1)
    np.testing.assert_equal(after, before)
