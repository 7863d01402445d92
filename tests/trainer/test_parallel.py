"""No split over micro-batches or ranks changes a loss, a gradient or what is exported."""

import pickle
import warnings

import numpy as np
import pytest
import torch

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import trainer_worker
from tests.trainer.trainer_worker import Samples, config_of
from tools.parity_rows import OVERLAP

COMMON = {"use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coef": 0.01, "clip_grad": 1.0, "weight_decay": 0.01}
_of_one_rank: dict[object, tuple[list, list]] = {}


def history(workers, folder, samples, layout, micro=3, steps=1, **values):
    """(metrics of two rollouts, weights after them) of one layout; tests share those of one rank."""
    key = layout.world_size == 1 and (folder, pickle.dumps(vars(samples)), micro, steps, repr(values))
    if key in _of_one_rank:
        return _of_one_rank[key]
    workers.start(config_of(folder, **(COMMON | values)), layout)
    metrics = [workers.train(samples.shards(layout.dp, steps, micro), layout, i) for i in range(2)]
    result = metrics, workers.run(trainer_worker.weights)
    if key:
        _of_one_rank[key] = result
    return result


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
            # A bias of keys that are not rotated changes no attention weight: its gradient is rounding.
            if not (family == "glm4" and name.endswith("k_proj.bias")):
                off = np.abs(weights[name] - tensor)
                # A gradient near 0 is rounding as well: one element in a thousand may be further off, on some CPUs.
                assert off.max() <= 40 * bound and (off > 10 * bound).mean() <= 1e-3, name


def assert_as_on_one_rank(workers, folder, samples, layout, bound, micro=3, steps=1, family="", **values):
    """The layout's history is that of one rank, which is returned."""
    one = history(workers, folder, samples, TrainerLayout(1), steps=steps, **values)
    assert_same(history(workers, folder, samples, layout, micro, steps, **values), one, bound, family)
    return one


@pytest.mark.parametrize("per_token", [True, False])
def test_micro_batches_and_data_parallel_ranks_change_nothing(workers, hf, per_token):
    samples = Samples(7, seed=11, share=2)  # seven samples: the two ranks' shards differ in size
    for layout in (TrainerLayout(1), TrainerLayout(2)):
        values = {"micro": 2, "calculate_per_token_loss": per_token}
        one = assert_as_on_one_rank(workers, hf("llama", True)[0], samples, layout, 1e-6, **values)
        assert one[0][0]["train/grad_norm"] > 0.1


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ddp", {"overlap_grad_reduce": True}),
        ("ddp", OVERLAP),
        ("transformer", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        ("transformer", {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}),
    ],
    ids=["overlap-grads", "overlap-params", "recompute-full", "recompute-selective"],
)
def test_megatrons_options_change_nothing(workers, hf, kind, fields):
    """With overlapped gathering, an export must not be a step old."""
    folder, samples = hf("qwen3", False)[0], Samples(7, seed=17, share=2)
    one = history(workers, folder, samples, TrainerLayout(1), steps=2)
    passed = {kind: fields}
    assert_same(history(workers, folder, samples, TrainerLayout(2), 2, steps=2, passthrough=passed), one, 3e-6)


def test_a_tied_embedding_that_is_frozen_on_both_stages(workers, hf):
    samples, frozen = Samples(7, seed=12), {"freeze_params_name_list": ["embed_tokens"]}
    one = assert_as_on_one_rank(workers, hf("qwen2", True)[0], samples, TrainerLayout(2, pp=2), 3e-6, **frozen)
    workers.start(config_of(hf("qwen2", True)[0]))
    name = "model.embed_tokens.weight"
    assert np.array_equal(workers.run(trainer_worker.weights)[0][name], one[1][0][name])


def test_a_rank_without_samples_takes_part(workers, hf):
    samples = Samples(1, seed=12, low=20, high=21)
    assert_as_on_one_rank(workers, hf("llama", True)[0], samples, TrainerLayout(2), 1e-6)


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
        ("olmo2", False, {"tp": 2}),
        ("smollm3", False, {"pp": 2}),
        ("granite", True, {"pp": 2}),
        ("gemma3_text", True, {"tp": 2}),
        ("gemma3_text", True, {"pp": 2}),
        ("olmo3", False, {"tp": 2}),
        ("gpt_oss", False, {"tp": 2}),
    ],
    ids=str,
)
def test_model_parallel_layouts(workers, hf, sizes, family, tied):
    # 121 tokens: tensor parallelism must pad the vocabulary.
    folder, _ = hf(family, tied, vocab_size=121)
    samples = Samples(6, seed=13, vocab=121, share=3)
    assert_as_on_one_rank(workers, folder, samples, TrainerLayout(2, **sizes), 1e-5, steps=2, family=family)
    first, second = workers.call("score", samples.shards()[0])
    assert [part.size for part in first] == samples.response.tolist()
    assert all(map(np.array_equal, first, second)), "each rank says the same"


def gradient_of_context_sum(actor):
    """Of a reducer that only adds up: autograd hands the sum a gradient that is one number, expanded."""
    from fusionrl.trainer.process_groups import sum_over_context_ranks

    values = torch.full((3,), actor.rank + 1.0, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # torch's own function is deprecated
        (sum_over_context_ranks()(values).sum() * (actor.rank + 1)).backward()
    return values.grad.tolist()


def test_an_expanded_gradient_is_summed_over_context_ranks(workers, hf):
    workers.start(config_of(hf("qwen3", True)[0]), TrainerLayout(2, cp=2))
    assert workers.run(gradient_of_context_sum) == [[3.0] * 3] * 2


def test_scores_and_validation_loss_do_not_depend_on_the_layout(workers, hf):
    folder, _ = hf("qwen3", True)
    samples, found = Samples(6, seed=14), []
    for layout in (TrainerLayout(1), TrainerLayout(2), TrainerLayout(2, cp=2), TrainerLayout(2, pp=2)):
        workers.start(config_of(folder, "sft"), layout)
        losses = [answer["eval/loss"] for answer in workers.on_shards("evaluate_loss", samples.shards(layout.dp))]
        found.append((losses, np.concatenate(workers.call("score", samples.shards()[0])[0])))
    for losses, scores in found:
        assert losses == pytest.approx(found[0][0] * len(losses), rel=1e-6)
        assert np.abs(scores - found[0][1]).max() <= 1e-5


@pytest.mark.parametrize("fault", ["reward", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(workers, hf, fault):
    workers.start(config_of(hf("llama", True)[0], lr=1e-2, max_skipped_steps=3), TrainerLayout(2))
    samples = Samples(6, seed=15)
    good = samples.shards(2)
    samples.rewards[0] = np.nan
    bad = samples.shards(2)
    workers.train(good)
    before = workers.call("state_hashes")
    if fault == "reward":
        metrics = workers.train(bad)
    else:
        workers.run(trainer_worker.poison_gradient)
        metrics = workers.train(good)
        assert np.isfinite(metrics["train/loss"])
        assert not np.isfinite(metrics["train/grad_norm"])
    assert metrics["train/skipped"] == 1.0
    assert workers.call("state_hashes") == before
    if fault == "reward":
        workers.train(bad)
        with pytest.raises(trainer_worker.Failed, match=r"sample 0 is not finite; that makes 3 in a row") as failure:
            workers.train(bad)
        assert failure.value.kind == "FloatingPointError"
    after = workers.train(good)
    assert after["train/skipped"] == 0.0 and np.isfinite(after["train/loss"])
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
