"""Metrics of a rollout of several optimizer steps, against loops in float64 over its tokens and samples."""

import math

import numpy as np
import pytest
import torch

from fusionrl.algorithms.divergence import MISMATCH_SUMS, mismatch_sums
from fusionrl.observe.glossary import undocumented
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.step_report import MISMATCH, MISMATCH_PEAK, StepReport, pooled_metrics
from tests.trainer.trainer_worker import Samples, config_of

SIZES = (3, 50, 400)  # tokens of three optimizer steps


def step_of(seed: int, num_tokens: int) -> tuple[StepReport, dict[str, np.ndarray]]:
    """A report, and the tokens' values that it is made of."""
    random, means = np.random.default_rng(seed), ("entropy", "ppo_kl", "clip_fraction")
    values = {name: random.random(num_tokens) for name in means}
    values["train"], values["engine"] = -random.random(num_tokens), -random.random(num_tokens)
    sums, peak = mismatch_sums(*(torch.tensor(values[n]) for n in ("train", "engine")), torch.ones(num_tokens))
    token_sums = {name: float(values[name].sum()) for name in means} | {"tokens": float(num_tokens)}
    token_sums |= {MISMATCH + name: float(x) for name, x in zip(MISMATCH_SUMS, sums, strict=True)}
    numbers = {"grad_norm": float(seed), "num_tokens": float(num_tokens), "skipped": 0.0, "lr": 0.1 * seed}
    maxima = {MISMATCH_PEAK: float(peak), "advantage_abs_max": 5.0 - seed}
    return StepReport({"loss": float(seed)}, token_sums, {"sequences": 2.0}, maxima, numbers), values


STEPS = [step_of(seed, size) for seed, size in enumerate(SIZES, start=1)]
REPORTS = [report for report, _ in STEPS]


def test_means_are_pooled_over_the_tokens_of_all_steps() -> None:
    found = pooled_metrics(REPORTS, first_is_old=True)
    whole = {name: np.concatenate([values[name] for _, values in STEPS]) for name in STEPS[0][1]}
    ratio = np.exp(whole["train"] - whole["engine"])
    wanted = {
        "entropy": whole["entropy"].mean(),
        "logprob_ratio_mean": ratio.mean(),
        "logprob_ratio_error": ratio.std() / math.sqrt(len(ratio)),
        "logprob_ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "logprob_diff_max": np.abs(whole["train"] - whole["engine"]).max(),
        "advantage_abs_max": 4.0,  # of the first of three steps
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_what_is_zero_by_construction_in_the_first_step_is_left_out() -> None:
    """In the first step the policy is the old one: its tokens would only dilute."""
    kls = [values["ppo_kl"] for _, values in STEPS]
    found = pooled_metrics(REPORTS, first_is_old=True)
    assert found["ppo_kl"] == pytest.approx(np.concatenate(kls[1:]).mean())
    assert found["ppo_kl_max"] == pytest.approx(max(kl.mean() for kl in kls[1:]))
    assert pooled_metrics(REPORTS)["ppo_kl"] == pytest.approx(np.concatenate(kls).mean()), "the engine's are the old"
    alone = pooled_metrics(REPORTS[:1], first_is_old=True)
    assert alone["ppo_kl"] == pytest.approx(kls[0].mean()), "a single step is all there is"


def test_one_number_a_step_has_a_mean_and_extremes() -> None:
    wanted = {"grad_norm": 2.0, "grad_norm_min": 1.0, "grad_norm_max": 3.0, "loss": 2.0, "lr": 0.2, "skipped": 0.0}
    wanted["num_tokens"] = sum(SIZES)
    found = pooled_metrics(REPORTS)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_a_step_that_is_not_a_number_shows_in_the_extremes_wherever_it_is() -> None:
    for order in ([math.nan, 1.0], [1.0, math.nan]):
        found = pooled_metrics([StepReport({}, {"tokens": 1.0}, numbers={"grad_norm": norm}) for norm in order])
        assert math.isnan(found["grad_norm_max"]) and math.isnan(found["grad_norm_min"])


def test_means_over_pairs_weigh_by_the_pairs() -> None:
    steps = [
        {"dpo_loss": 1.0, "num_pairs": 9.0, "pairs_excluded": 1.0},
        {"num_pairs": 0.0, "pairs_excluded": 2.0},
        {"dpo_loss": 3.0, "num_pairs": 1.0, "pairs_excluded": 0.0},
    ]
    found = pooled_metrics([StepReport({}, {"tokens": 1.0}, numbers=numbers) for numbers in steps])
    wanted = {"dpo_loss": 1.2, "num_pairs": 10.0, "pairs_excluded": 3.0}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_entropy_and_kl_do_not_depend_on_the_aggregation(workers, hf):
    folder, _ = hf("llama", True)
    samples, found = Samples(6, seed=71), {}
    samples.mask[2][:] = 0.0
    values = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.01, "kl_loss_type": "k1", "lr": 0.02}
    for kind in ("token_mean", "sequence_mean", "constant"):
        for layout in (TrainerLayout(1), TrainerLayout(2, cp=2)):
            workers.start(config_of(folder, loss_aggregation=kind, loss_length=40, **values), layout)
            workers.call("keep_weights", "ref")
            # Under the weights of the checkpoint, and so that policy and reference differ after it.
            found[kind, layout.world_size] = workers.train(samples.shards(layout.dp, micro=2), layout, 0)
            (shard,) = samples.shards()
            policy, reference = (workers.call("score", shard, name)[0] for name in (None, "ref"))
            metrics = workers.train(samples.shards(layout.dp, micro=2), layout, 1)
            gaps = [(p - r)[m > 0] for p, r, m in zip(policy, reference, samples.mask, strict=True)]
            assert metrics["train/kl_loss"] == pytest.approx(float(np.concatenate(gaps).mean()), rel=1e-3)
    entropy = found["token_mean", 1]["train/entropy"]
    assert len({round(metrics["train/pg_loss"], 4) for metrics in found.values()}) == 3, "the losses do differ"
    for metrics in found.values():
        assert metrics["train/entropy"] == pytest.approx(entropy, rel=1e-5)
        assert (metrics["train/num_samples"], metrics["train/masked_samples"]) == (6, 1)


def test_gspo_counts_the_sequences_that_it_clips(workers, hf):
    """Its ratio is one of a whole response; the share of tokens stands beside the share of responses."""
    folder, _ = hf("llama", True)
    samples = Samples(8, seed=72)
    samples.mask[3][:] = 0.0
    values = {"policy_loss": "gspo", "loss_aggregation": "sequence_mean", "use_rollout_logprobs": True, "eps_clip": 0.3}
    for layout in (TrainerLayout(1), TrainerLayout(2), TrainerLayout(2, cp=2)):
        workers.start(config_of(folder, **values), layout)
        policy = workers.call("score", samples.shards()[0])[0]
        random = np.random.default_rng(72)
        shifts = random.choice([-0.6, 0.0, 0.6], size=8)
        samples.log_probs = [(p + s).astype(np.float32) for p, s in zip(policy, shifts, strict=True)]
        samples.rewards = np.where(random.random(8) < 0.5, 1.0, -1.0).astype(np.float32)
        clipped, tokens = [], []
        for i in {*range(8)} - {3}:
            trained = samples.mask[i] > 0
            ratio = math.exp(float((policy[i] - samples.log_probs[i])[trained].mean()))
            clipped.append(ratio > 1.3 if samples.rewards[i] > 0 else ratio < 0.7)
            tokens += clipped[-1:] * int(trained.sum())
        assert 0 < sum(clipped) < 7 and np.mean(clipped) != np.mean(tokens)
        metrics = workers.train(samples.shards(layout.dp, micro=2), layout, 0)
        assert metrics["train/clip_fraction"] == pytest.approx(np.mean(clipped)), layout
        assert metrics["train/clip_fraction_tokens"] == pytest.approx(np.mean(tokens)), layout


@pytest.mark.parametrize("layout", [TrainerLayout(2, **sizes) for sizes in ({}, {"pp": 2}, {"cp": 2})], ids=str)
def test_the_largest_advantage_is_that_of_one_trained_token_on_any_rank(workers, hf, layout):
    workers.start(config_of(hf("llama", True)[0], max_skipped_steps=9), layout)
    samples = Samples(6, seed=73, low=20)
    samples.mask[5][:] = 0.0
    # One token has it: in the first or the second of two steps, on the first or the second rank (of context-parallel
    # ones, too: the second has a sequence's middle), above or below 0.
    for largest, sign, is_last in ((0, 1.0, True), (1, -1.0, False), (3, -1.0, True), (4, 1.0, False)):
        samples.rewards = np.array([0.1, -0.2, 0.3, -0.1, 0.2, 99.0], np.float32)
        samples.rewards[largest] = sign * 7.5
        middle = max(samples.total[largest] // 2 - (samples.total[largest] - samples.response[largest]), 0)
        samples.mask[largest][:] = 0.0
        samples.mask[largest][-1 if is_last else middle] = 1.0
        metrics = workers.train(samples.shards(layout.dp, steps=2, micro=1), layout)
        assert metrics["train/advantage_abs_max"] == 7.5
        assert not undocumented(metrics)
    for broken in (0, 1):
        samples.rewards[broken] = np.nan
        metrics = workers.train(samples.shards(layout.dp, steps=2, micro=1), layout)
        assert metrics["train/advantage_abs_max"] == math.inf, "wherever the rank is that has it"
        samples.rewards[broken] = 0.1
