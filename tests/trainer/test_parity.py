"""The trainer against transformers: logits, log-probs, gradients and optimizer steps."""

import itertools

import numpy as np
import pytest
import torch

from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import warm_up_notes
from tests.trainer import hf_models, trainer_worker
from tests.trainer.trainer_worker import Samples, config_of
from tools.parity import all_logits, checkpoint_gradients, run_logits

FAMILIES = [(family, False) for family in hf_models.FAMILIES]
FAMILIES += [(family, True) for family in ("llama", "qwen2", "qwen3")]
LAYOUTS = [TrainerLayout(1), *(TrainerLayout(2, **{size: 2}) for size in ("tp", "pp", "cp")), TrainerLayout(2)]


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], bound: float) -> None:
    """Relative L2 difference of every tensor."""
    assert set(got) == set(want)
    for name, tensor in want.items():
        difference = np.linalg.norm(got[name] - tensor) / max(np.linalg.norm(tensor), 1e-12)
        assert difference <= bound, f"{name}: relative difference {difference:.2e}"


def assert_step_equals(workers, metrics, model, samples, mode, loss_bound, **options) -> None:
    """Loss, within the `loss_bound` of pytest.approx, and the gradient of every tensor."""
    trained = hf_models.clone(model)
    loss = hf_models.loss(trained, samples, list(range(len(samples))), mode, **options)
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), **loss_bound)
    assert_close(workers.run(trainer_worker.gradients)[0], checkpoint_gradients(trained), 1e-4)


def assert_scores(workers, shard, model, samples, **options) -> None:
    want = hf_models.all_log_probs(model, samples, **options)
    assert np.abs(np.concatenate(workers.call("score", shard)[0]) - want).max() <= 1e-5


SFT_BOUND, RL_BOUND = {"rel": 1e-5}, {"rel": 1e-4, "abs": 1e-6}


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_logits_log_probs_and_first_gradients_equal_transformers(workers, hf, family, tied):
    folder, model = hf(family, tied)
    reference_folder, reference = hf(family, tied, seed=5)
    samples = Samples(7, seed=3)
    common = {"rollout_temperature": 0.7, "log_probs_chunk_size": 16}  # several chunks a micro-batch
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.3, "ref_load": str(reference_folder), "entropy_coef": 0.05}
    workers.start(config_of(folder, **flags, **common))
    (shard,) = samples.shards(micro=4)

    (packed,) = workers.run(all_logits, shard, [list(range(7))])[0]
    with torch.no_grad():
        plain = [model(torch.tensor(t[:-1], dtype=torch.long)[None]).logits[0].numpy() for t in samples.tokens]
    assert np.abs(packed - np.concatenate(plain)).max() <= read_model_shape(folder).logit_bound

    assert_scores(workers, shard, model, samples, temperature=0.7)

    metrics = workers.train([shard])
    options = {"temperature": 0.7, "reference": reference, "kl_coef": 0.3, "entropy_coef": 0.05}
    assert_step_equals(workers, metrics, model, samples, "rl", RL_BOUND, **options)
    assert metrics["train/kl_loss"] > 0.01
    assert metrics["train/clip_fraction"] == 0.0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_sample_is_scored_at_its_own_temperature(workers, hf, layout):
    """Loss, entropy, KL and gradients; --rollout-temperature is that of samples that say nothing."""
    folder, model = hf("qwen3", False)
    reference_folder, reference = hf("qwen3", False, seed=5)
    samples = Samples(6, seed=3)
    temperatures = [0.7, 0.7, 1.3, 0.5, 2.0, 1.0]
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.3, "ref_load": str(reference_folder), "entropy_coef": 0.05}
    workers.start(config_of(folder, rollout_temperature=0.7, **flags), layout)
    shards = samples.shards(layout.dp, micro=2)
    for shard in shards:
        own = np.array([temperatures[int(index)] for index in shard.fields["sample_index"]], np.float32)
        shard.fields["temperatures"] = np.repeat(own, shard.response_lengths)
    metrics = workers.train(shards, layout)
    trained = hf_models.clone(model)
    options = {"temperature": temperatures, "reference": reference, "kl_coef": 0.3, "entropy_coef": 0.05}
    loss = hf_models.loss(trained, samples, list(range(6)), "rl", **options)
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    if layout.world_size == 1:
        assert_close(workers.run(trainer_worker.gradients)[0], checkpoint_gradients(trained), 1e-4)
    norm = np.sqrt(sum(float(p.grad.pow(2).sum()) for p in trained.parameters() if p.grad is not None))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_divided_logits_equal_transformers(workers):
    results = run_logits(["deepseek_v3"], lambda entry: None, workers)
    assert len(results) == 4
    assert all(entry["holds"] for entry in results), results


@pytest.mark.parametrize(
    ("family", "tied", "per_token"),
    [
        *(("llama", True, True), ("qwen2", False, False), ("qwen3_moe", False, False)),
        *((name, False, True) for name in hf_models.PLUGINS),
    ],
)
def test_sft_gradients_equal_transformers(workers, hf, family, tied, per_token):
    folder, model = hf(family, tied)
    samples = Samples(6, seed=4)
    # A temperature is of sampling; it must not reach supervised training.
    workers.start(config_of(folder, "sft", rollout_temperature=0.5, calculate_per_token_loss=per_token))
    metrics = workers.train(samples.shards(micro=4))
    assert_step_equals(workers, metrics, model, samples, "sft", SFT_BOUND, per_token=per_token)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[2], LAYOUTS[4]], ids=str)
def test_a_kind_of_a_plug_in_is_divided(workers, hf, layout):
    """plugins/models/short_conv.py on several ranks, packed, against plain torch, a sequence at a time."""
    folder, model = hf("short_conv", False)
    samples = Samples(6, seed=9)
    workers.start(config_of(folder, "sft"), layout)
    metrics = workers.train(samples.shards(layout.dp, micro=3), layout)
    trained = hf_models.clone(model)
    loss = hf_models.loss(trained, samples, list(range(6)), "sft")
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = np.sqrt(sum(float(p.grad.pow(2).sum()) for p in trained.parameters() if p.grad is not None))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_close(workers.run(trainer_worker.gradients)[0], checkpoint_gradients(trained), 1e-4)


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 3.0}


YARN, LINEAR = {"rope_type": "yarn"}, {"rope_type": "linear"}


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", LLAMA3), ("qwen3", YARN), ("qwen2_moe", YARN), ("olmo3", YARN), ("gemma3_text", LINEAR)],
)
def test_scaled_positions(workers, hf, family, kind):
    """In families with windows, of layers without one."""
    scaling = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32} | kind
    if family in ("olmo3", "gemma3_text"):
        scaling = {"full_attention": scaling, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    folder, model = hf(family, False, rope_parameters=scaling)
    samples = Samples(3, seed=8, low=60, high=100)
    workers.start(config_of(folder, "sft"))
    (shard,) = samples.shards(micro=3)
    assert_scores(workers, shard, model, samples)
    assert_step_equals(workers, workers.train([shard]), model, samples, "sft", SFT_BOUND)


@pytest.mark.parametrize(("family", "high"), [("qwen3", 40), ("qwen3", 1000), ("gemma3_text", 40), ("olmo3", 1000)])
def test_a_prompt_that_samples_share_is_computed_once(workers, hf, family, high):
    """Groups of four; with long ones, the rows of a group fall into different attention calls."""
    folder, model = hf(family, False, max_position_embeddings=1024)
    samples = Samples(10, seed=high + 1, high=high, share=4)  # which saves a third of the tokens, at least
    workers.start(config_of(folder, entropy_coef=0.05))
    (shard,) = samples.shards(micro=10)
    prompts = [int(samples.total[i] - samples.response[i]) for i in (0, 4, 8)]
    assert workers.run(trainer_worker.num_packed_tokens, shard)[0] == [sum(prompts) + samples.response.sum() - 10]
    assert_scores(workers, shard, model, samples)
    metrics = workers.train([shard])
    assert_step_equals(workers, metrics, model, samples, "rl", RL_BOUND, entropy_coef=0.05)
    shared = workers.run(trainer_worker.gradients)[0]
    workers.start(config_of(folder, share_prompts=False, entropy_coef=0.05))
    assert workers.run(trainer_worker.num_packed_tokens, shard)[0] == [int(samples.total.sum()) - 10]
    workers.train([shard])
    assert_close(workers.run(trainer_worker.gradients)[0], shared, 1e-6)


def test_adam_steps_equal_torch(workers, hf):
    folder, model = hf("qwen2", True)
    samples = Samples(6, seed=6)
    schedule = {"lr": 3e-3, "min_lr": 1e-3, "lr_decay_style": "linear", "lr_decay_iters": 4}
    workers.start(config_of(folder, "sft", **schedule, weight_decay=0.1, clip_grad=0.5, adam_beta2=0.95))
    trained = hf_models.clone(model)
    # Megatron's rule: no decay for biases and norms.
    decays = [{"params": [p for p in trained.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    decays += [{"params": [p for p in trained.parameters() if p.dim() > 1], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(decays, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        metrics = workers.train(samples.shards())
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 + 2e-3 * (1 - step / 4)
        assert metrics["train/lr"] == pytest.approx(group["lr"])
        optimizer.zero_grad()
        hf_models.loss(trained, samples, list(range(6)), "sft").backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        assert norm > 0.5, "clipping must have something to do"
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()
    # Adam magnifies rounding where a gradient is all but zero; a missing weight decay would show as 9e-4.
    assert_weights(workers, trained, 1e-4)


def assert_weights(workers, trained, bound: float) -> None:
    want = {name: param.detach().numpy() for name, param in trained.named_parameters()}
    assert_close(workers.run(trainer_worker.weights)[0], want, bound)


@pytest.mark.parametrize("use_rollout_log_probs", [False, True])
def test_several_steps_a_rollout(workers, hf, use_rollout_log_probs):
    """The old log-probs are those before the first step (or the engine's), and clipping sets in."""
    folder, model = hf("llama", True)
    samples = Samples(8, seed=7)
    engine = hf_models.clone(model)
    with torch.no_grad():
        for param in engine.parameters():
            param.add_(0.02 * torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())))
        own, engines = (
            [hf_models.response_log_probs(which, samples, i)[0] for i in range(8)] for which in (model, engine)
        )
    samples.log_probs = [part.numpy() for part in engines]
    old = engines if use_rollout_log_probs else own
    flags = {"eps_clip": 0.1, "eps_clip_high": 0.3, "use_rollout_logprobs": use_rollout_log_probs}
    workers.start(config_of(folder, lr=2e-2, **flags))
    metrics = workers.train(samples.shards(steps=2))
    trained = hf_models.clone(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-2, betas=(0.9, 0.98), weight_decay=0.0)
    losses = []
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7]):
        optimizer.zero_grad()
        loss = hf_models.loss(trained, samples, ids, "rl", old=old, clip=(0.1, 0.3))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert metrics["train/loss"] == pytest.approx(sum(losses) / 2, rel=1e-3, abs=1e-5)
    assert metrics["train/clip_fraction"] > 0.05
    assert_weights(workers, trained, 1e-3)
    # Engine against trainer, under the weights of the rollout: all samples, or those of the first step.
    compared = range(4) if use_rollout_log_probs else range(8)
    difference = np.concatenate([np.abs(own[i].numpy() - samples.log_probs[i])[samples.mask[i] > 0] for i in compared])
    assert metrics["train/logprob_diff_mean"] == pytest.approx(difference.mean(), rel=1e-3)
    assert metrics["train/logprob_diff_max"] == pytest.approx(difference.max(), rel=1e-3)


@pytest.mark.parametrize("init", [0.0, 2e-4])
def test_the_first_steps_have_the_rates_of_the_plan(workers, hf, init):
    """With --lr-warmup-init 0 the first optimizer step changes no weight; with more than 0 it does."""
    config = config_of(hf("qwen3", True)[0], lr_warmup_iters=2, lr_warmup_init=init)
    workers.start(config)
    weights, rates = [workers.call("state_hashes")[0]["weights"]], []
    for rollout_id in range(4):
        rates.append(workers.train(Samples(6, seed=rollout_id).shards(), None, rollout_id)["train/lr"])
        weights.append(workers.call("state_hashes")[0]["weights"])
    assert rates == pytest.approx([init, (init + 1e-3) / 2, 1e-3, 1e-3])
    assert [after != before for before, after in itertools.pairwise(weights)] == [init > 0, True, True, True]
    (note,) = warm_up_notes(config, 4)
    assert note.startswith(f"learning rate {init:g} at optimizer step 1") and "0.001 from step 3 on" in note
    assert ("changes no weights" in note) == (init == 0)
