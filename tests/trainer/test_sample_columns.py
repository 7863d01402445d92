"""What training finds out about single samples is the same in every layout, and what a reference computes."""

import numpy as np
import pytest

from tests.trainer.test_losses import at_the_edge
from tests.trainer.test_parity import LAYOUTS
from tests.trainer.trainer_worker import Samples, config_of


def columns_of_all(workers, rollout_id=0):
    """Position -> columns; each sample is reported by one rank."""
    whole = {}
    for part in workers.call("sample_columns", rollout_id):
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


@pytest.mark.parametrize("steps", [1, 2], ids=["from-the-loss", "from-log-probs"])
def test_values_of_samples_and_tokens_in_every_layout(workers, hf, steps):
    """With --save-token-values also of each token that is trained on, as a separate pass scores it."""
    folder, _ = hf("qwen3", False)
    samples = Samples(7, seed=21, share=2)
    samples.mask[3][:] = 0.0
    samples.mask[4][1] = 0.0
    workers.start(config_of(folder))
    scores = workers.call("score", samples.shards()[0])[0]
    entropies = {}
    for layout in LAYOUTS:
        workers.start(config_of(folder, save_token_values=True), layout)
        metrics = workers.train(samples.shards(layout.dp, steps), layout)
        found = columns_of_all(workers)
        assert sorted(found) == list(range(7)), layout
        sums = np.zeros(3)  # of entropies and mismatches of trained tokens, and their number
        for i, columns in found.items():
            mask = samples.mask[i] > 0
            assert columns["num_trained"] == mask.sum()
            assert columns["trained_reward"] == pytest.approx(samples.rewards[i])
            for column in ("log_probs", "entropy", "advantages"):
                assert columns[column].dtype == np.float32 and len(columns[column]) == len(mask)
                np.testing.assert_array_equal(np.isfinite(columns[column]), mask, err_msg=f"{layout} {i} {column}")
            if not mask.any():
                assert not {"advantage", "mismatch"} & set(columns), "nothing is known of a masked sample"
                continue
            assert columns["advantage"] == pytest.approx(samples.rewards[i], rel=1e-6)
            gaps = np.abs(scores[i].astype(np.float64) - samples.log_probs[i])[mask]
            assert columns["mismatch"] == pytest.approx(gaps.mean(), rel=1e-4), (layout, i)
            np.testing.assert_allclose(columns["log_probs"][mask], scores[i][mask], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(columns["advantages"][mask], samples.rewards[i], rtol=1e-6)
            entropy = columns["entropy"]
            sums += entropy[mask].sum(dtype=np.float64), columns["mismatch"] * mask.sum(), mask.sum()
            np.testing.assert_allclose(entropy, entropies.setdefault(i, entropy), rtol=1e-3, atol=1e-4)
        assert metrics["train/entropy"] == pytest.approx(sums[0] / sums[2], rel=1e-5), layout
        if steps == 1:
            assert metrics["train/logprob_diff_mean"] == pytest.approx(sums[1] / sums[2], rel=1e-6), layout


def test_a_custom_loss_has_the_token_values_that_the_shard_has(workers, hf):
    samples = Samples(4, seed=26)
    samples.mask[1][0] = 0.0
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": "tests/trainer/train_hooks.py:of_logits"}
    workers.start(config_of(hf("qwen3", False)[0], save_token_values=True, **custom))
    workers.train(samples.shards())
    for i, columns in columns_of_all(workers).items():
        assert columns.keys() & {"advantages", "log_probs", "entropy"} == {"advantages", "log_probs"}
        np.testing.assert_array_equal(np.isfinite(columns["log_probs"]), samples.mask[i] > 0)
        wanted = np.where(samples.mask[i] > 0, samples.rewards[i], np.nan)
        np.testing.assert_allclose(columns["advantages"], wanted, rtol=1e-6)


def test_several_steps_that_trust_the_engine_compare_the_first_alone(workers, hf):
    """After an optimizer step the weights are no longer those that the samples were made with."""
    workers.start(config_of(hf("qwen3", False)[0], use_rollout_logprobs=True))
    workers.train(Samples(6, seed=22).shards(1, 2))
    found = columns_of_all(workers)
    assert [i for i in found if "mismatch" in found[i]] == [0, 1, 2]
    assert all("advantage" in columns for columns in found.values())


def test_with_the_engines_log_probs_as_the_old_ones_the_first_step_counts(workers, hf):
    """With the trainers' own its ratios are 1, and say nothing of how far the steps went."""
    samples, found, names = Samples(6, seed=22), [], ("train/ppo_kl", "train/clip_fraction")
    for steps in (1, 2):
        workers.start(config_of(hf("qwen3", False)[0], use_rollout_logprobs=True, lr=0.0))
        metrics = workers.train(samples.shards(1, steps))
        found.append([metrics[name] for name in names])
    assert found[1] == pytest.approx(found[0], rel=1e-5) and min(map(abs, found[0])) > 0.01


def test_log_probs_that_are_no_numbers_and_samples_without_tokens(workers, hf):
    for steps in (1, 2):
        workers.start(config_of(hf("llama", True)[0]))
        workers.train(at_the_edge().shards(1, steps))
        found = columns_of_all(workers)
        for i in (1, 2):
            assert set(found[i]) == {"num_trained", "trained_reward"} and found[i]["num_trained"] == 0
        assert np.isfinite(found[3]["mismatch"]), "its tokens that have log-probs count"
        assert found[4]["advantage"] == 0.0


def test_only_the_last_rollout_that_was_trained_on(workers, hf):
    folder, _ = hf("llama", True)
    workers.start(config_of(folder))
    assert workers.call("sample_columns", 0) == [{}]
    workers.train(Samples(4, seed=24).shards(), rollout_id=3)
    assert workers.call("sample_columns", 2) == [{}] and len(workers.call("sample_columns", 3)[0]) == 4
    workers.start(config_of(folder, "sft"))
    workers.train(Samples(4, seed=24).shards())
    assert workers.call("sample_columns", 0) == [{}]


@pytest.mark.parametrize("steps", [1, 2], ids=["from-the-loss", "from-log-probs"])
def test_tokens_of_older_weights_are_no_mismatch(workers, hf, steps):
    """They are trained on; how far they are off says how old they are, and not that engine and trainer disagree."""
    samples = Samples(6, seed=25)
    workers.start(config_of(hf("qwen3", False)[0]))
    scores = workers.call("score", samples.shards()[0])[0]
    (shard,) = samples.shards(1, steps)
    current = [(np.arange(n) >= n // 2).astype(np.float32) for n in samples.response]
    current[2][:] = 0.0
    shard.fields["current"] = np.concatenate(current)
    metrics = workers.train([shard])
    gaps = [np.abs(a.astype(np.float64) - b) for a, b in zip(scores, samples.log_probs, strict=True)]
    used = [(m > 0) & (c > 0) for m, c in zip(samples.mask, current, strict=True)]
    wanted = np.concatenate([gap[own] for gap, own in zip(gaps, used, strict=True)])
    assert metrics["train/logprob_diff_mean"] == pytest.approx(wanted.mean(), rel=1e-4)
    found = columns_of_all(workers)
    for i, columns in found.items():
        assert columns["num_trained"] == int(samples.mask[i].sum())
        if used[i].any():
            assert columns["mismatch"] == pytest.approx(gaps[i][used[i]].mean(), rel=1e-4)
        else:
            assert "mismatch" not in columns
