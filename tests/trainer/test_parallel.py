"""No split over micro-batches or ranks changes a loss, a gradient or what is exported."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import trainer_worker
from tests.trainer.trainer_worker import Samples, config_of

COMMON = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.2,
    "entropy_coef": 0.01,
    "clip_grad": 1.0,
    "weight_decay": 0.01,
}


def history(workers, folder, samples, layout, micro=3, steps=1, **values):
    """(metrics of two rollouts, weights after them) of one layout."""
    workers.start(config_of(folder, **(COMMON | values)), layout)
    metrics = [workers.train(samples.shards(layout.dp, steps, micro), layout, i) for i in range(2)]
    return metrics, workers.run(trainer_worker.weights)


def assert_same(got, want, bound, family=""):
    for ours, theirs in zip(got[0], want[0], strict=True):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            # Adam's division blows up rounding, and the next gradient shows it: parity's bound there is 1e-4.
            within = 10 * bound if "grad_norm" in name else bound
            assert ours[name] == pytest.approx(value, rel=within, abs=within), name
    reference = want[1][0]
    for weights in got[1]:
        assert list(weights) == list(got[1][0]), "every rank exports the same names in the same order"
        assert set(weights) == set(reference)
        for name, tensor in reference.items():
            # A bias of keys that are not rotated changes no attention weight: its gradient is rounding, which Adam's
            # division blows up to whole steps.
            if not (family == "glm4" and name.endswith("k_proj.bias")):
                off = np.abs(weights[name] - tensor)
                # A gradient near 0 is rounding as well: one element in a thousand may be further off, on some CPUs.
                assert off.max() <= 40 * bound and (off > 10 * bound).mean() <= 1e-3, name


@pytest.mark.parametrize("per_token", [True, False])
def test_micro_batches_and_data_parallel_ranks_change_nothing(workers, hf, per_token):
    folder, _ = hf("llama", True)
    samples = Samples(7, seed=11, share=2)  # seven samples: the two ranks' shards differ in size
    values = {"calculate_per_token_loss": per_token}
    one = history(workers, folder, samples, TrainerLayout(1), micro=7, **values)
    assert one[0][0]["train/grad_norm"] > 0.1
    assert_same(history(workers, folder, samples, TrainerLayout(1), micro=2, **values), one, 1e-6)
    assert_same(history(workers, folder, samples, TrainerLayout(2), micro=2, **values), one, 1e-6)


@pytest.mark.parametrize(
    "passthrough",
    [
        {"ddp": {"overlap_grad_reduce": True}},
        {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
        {
            "transformer": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        },
        {
            "transformer": {
                "recompute_granularity": "selective",
                "recompute_modules": ["core_attn", "layernorm"],
            }
        },
    ],
    ids=["overlap-grads", "overlap-params", "recompute-full", "recompute-selective"],
)
def test_megatrons_options_change_nothing(workers, hf, passthrough):
    """With overlapped gathering, an export must not be a step old."""
    folder, _ = hf("qwen3", False)
    samples = Samples(7, seed=17, share=2)
    one = history(workers, folder, samples, TrainerLayout(1), steps=2)
    assert_same(
        history(workers, folder, samples, TrainerLayout(2), micro=2, steps=2, passthrough=passthrough),
        one,
        3e-6,
    )


def test_a_rank_without_samples_takes_part(workers, hf):
    folder, _ = hf("llama", True)
    samples = Samples(1, seed=12, low=20, high=21)
    one = history(workers, folder, samples, TrainerLayout(1))
    assert_same(history(workers, folder, samples, TrainerLayout(2)), one, 1e-6)


@pytest.mark.parametrize(
    ("family", "tied", "sizes"),
    [
        ("qwen2", True, {"tp": 2}),
        ("qwen2", True, {"pp": 2}),
        ("qwen3", False, {"cp": 2}),
        ("glm4", False, {"tp": 2}),
        ("qwen3_moe", False, {"ep": 2}),
        ("mixtral", False, {"tp": 2, "etp": 2}),
        ("glm4_moe", False, {"pp": 2}),
        ("deepseek_v3", False, {"tp": 2, "etp": 2}),
        ("deepseek_v3", False, {"ep": 2}),
    ],
    ids=str,
)
def test_model_parallel_layouts(workers, hf, sizes, family, tied):
    """tools/parity.py has many more, and compares the gradient of every tensor."""
    # 121 tokens: tensor parallelism must pad the vocabulary.
    folder, _ = hf(family, tied, vocab_size=121)
    samples = Samples(6, seed=13, vocab=121, share=3)
    one = history(workers, folder, samples, TrainerLayout(1), steps=2)
    layout = TrainerLayout(2, **sizes)
    assert_same(history(workers, folder, samples, layout, steps=2), one, 1e-5, family)
    first, second = workers.call("score", samples.shards()[0])
    assert [part.size for part in first] == samples.response.tolist()
    assert all(map(np.array_equal, first, second)), "each rank says the same"


def gradient_of_context_sum(actor):
    """Of a reducer that only adds up: autograd hands the sum a gradient that is one number, expanded."""
    import warnings

    import torch

    from fusionrl.trainer.context_parallel import sum_over_context_ranks

    values = torch.full((3,), actor.rank + 1.0, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # torch's own function is deprecated
        (sum_over_context_ranks()(values).sum() * (actor.rank + 1)).backward()
    return values.grad.tolist()


def test_an_expanded_gradient_is_summed_over_context_ranks(workers, hf):
    folder, _ = hf("qwen3", True)
    workers.start(config_of(folder), TrainerLayout(2, cp=2))
    assert workers.run(gradient_of_context_sum) == [[3.0] * 3] * 2


def test_scores_and_validation_loss_do_not_depend_on_the_layout(workers, hf):
    folder, _ = hf("qwen3", True)
    samples = Samples(6, seed=14)
    layouts = [TrainerLayout(1), TrainerLayout(2), TrainerLayout(2, cp=2), TrainerLayout(2, pp=2)]
    losses, scores = [], []
    for layout in layouts:
        workers.start(config_of(folder, "sft"), layout)
        shards = samples.shards(layout.dp)
        per_rank = [(shards[layout.dp_rank(rank)],) for rank in range(layout.world_size)]
        losses.append([answer["eval/loss"] for answer in workers.call_each("evaluate_loss", per_rank)])
        scores.append(workers.call("score", samples.shards()[0])[0])
    for other_losses, other_scores in zip(losses, scores, strict=True):
        assert other_losses == pytest.approx([losses[0][0]] * len(other_losses), rel=1e-6)
        for got, want in zip(other_scores, scores[0], strict=True):
            assert np.abs(got - want).max() <= 1e-5


@pytest.mark.parametrize("fault", ["reward", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(workers, hf, fault):
    folder, _ = hf("llama", True)
    layout = TrainerLayout(2)
    workers.start(config_of(folder, lr=1e-2, max_skipped_steps=3), layout)
    good = Samples(6, seed=15)
    workers.train(good.shards(2), layout)
    before = workers.call("state_hashes")
    if fault == "reward":
        metrics = workers.train(Samples(6, seed=15, nan_reward=True).shards(2), layout)
    else:
        workers.run(trainer_worker.poison_gradient)
        metrics = workers.train(good.shards(2), layout)
        assert np.isfinite(metrics["train/loss"])
        assert not np.isfinite(metrics["train/grad_norm"])
    assert metrics["train/skipped"] == 1.0
    assert workers.call("state_hashes") == before
    if fault == "reward":
        workers.train(Samples(6, seed=15, nan_reward=True).shards(2), layout)
        with pytest.raises(trainer_worker.Failed, match=r"sample 0 is not finite; that makes 3 in a row") as failure:
            workers.train(Samples(6, seed=15, nan_reward=True).shards(2), layout)
        assert failure.value.kind == "FloatingPointError"
    after = workers.train(good.shards(2), layout)
    assert after["train/skipped"] == 0.0
    assert np.isfinite(after["train/loss"])
    assert workers.call("state_hashes") != before


def test_bf16_trains(workers, hf):
    folder, _ = hf("qwen3", False)
    layout = TrainerLayout(2)
    info = workers.start(config_of(folder, "sft", precision="bf16", lr=3e-3), layout)
    assert info[0]["precision"] == "bf16"
    samples = Samples(8, seed=16)
    losses = [workers.train(samples.shards(2), layout)["train/loss"] for _ in range(12)]
    assert losses[-1] < 0.75 * losses[0], losses
    workers.start(config_of(folder, "sft", lr=3e-3))
    exact = workers.train(samples.shards())["train/loss"]
    assert losses[0] == pytest.approx(exact, rel=0.02)
