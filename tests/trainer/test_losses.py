"""Every loss: no split over micro-batches, data-parallel and context-parallel ranks changes its gradient."""

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from fusionrl.plan.layout import TrainerLayout
from tests.trainer.test_parallel import assert_as_on_one_rank, assert_same, history
from tests.trainer.test_train_hooks import HOOKS
from tests.trainer.trainer_worker import Failed, Samples, config_of, weights

NO_EXTRAS = {"use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_coef": 0.0}
SEQUENCE = {"loss_aggregation": "sequence_mean"}
LOSSES = {
    "ppo": {"eps_clip_high": 0.28, "eps_clip_c": 3.0},
    "ppo-constant": {"loss_aggregation": "constant", "loss_length": 40},
    "gspo": {"policy_loss": "gspo", "eps_clip": 0.003, **SEQUENCE},
    "gspo_token": {"policy_loss": "gspo_token", "eps_clip": 0.003, **SEQUENCE},
    "cispo": {"policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    "sapo": {"policy_loss": "sapo", **SEQUENCE},
    "gpg": {"policy_loss": "gpg"},
    "gmpo": {"policy_loss": "gmpo", "eps_clip": 0.4, **SEQUENCE},
    "clip_cov": {"policy_loss": "clip_cov", "clip_cov_fraction": 0.2, "clip_cov_low": 0.01},
    "kl_cov": {"policy_loss": "kl_cov", "kl_cov_fraction": 0.2},
    "dpo": {"policy_loss": "dpo", "dpo_label_smoothing": 0.1},
    "tis-sequence": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1e6},
    "mis-geometric": {"use_tis": True, "tis_level": "geometric", "tis_mode": "mask", "tis_clip": 20.0},
    "rejection": {"rejection_level": "geometric", "rejection_low": 0.0, "rejection_high": 10.0, "tis_veto": 1e-9},
    "opsm": {"use_opsm": True, "opsm_delta": 1e-3},
    "unbiased-kl": {"use_kl_loss": True, "kl_loss_coef": 0.3, "use_unbiased_kl": True, "entropy_coef": 0.01},
    "sft": {"loss_type": "sft_loss"},
}


def pairs_of(samples: Samples) -> None:
    """Samples 2 i and 2 i + 1 are chosen and rejected."""
    samples.rewards = np.array([1.0, -1.0] * (len(samples) // 2), np.float32)


def gradients_of(actor, shard, config, thetas, olds):
    """Gradients of the first step's loss by each sample's log-probs, in float64, of this rank's tokens.

    thetas, olds  sample -> [response_length] float64 log-probs of the policy now, and of the one that acted
    """
    from fusionrl.trainer.advantages import add_advantages, pair_advantages, select_tokens
    from fusionrl.trainer.loss import LossOptions, micro_batch_loss
    from fusionrl.trainer.micro_batches import BatchOptions, build_micro_batches

    names = shard.fields["sample_index"].tolist()
    flat = [np.concatenate([np.zeros(0), *(table[i] for i in names)]) for table in (thetas, olds)]
    shard.fields["log_probs"], shard.fields["ref_log_probs"] = flat[1], flat[1] * 0.9
    options = LossOptions.from_config(config)
    step = shard.steps[0]
    add_advantages(shard, config, actor.device)
    if options.policy_loss in ("clip_cov", "kl_cov"):
        select_tokens(shard, step, flat[0], options, seed=3)
        shard.fields["selected"] = shard.fields["selected"].astype(np.float32)
    if options.policy_loss == "dpo":
        # The pre-pass sees the policy as it is now.
        pair_advantages(shard, step, flat[0], 0.3, config.algorithm.dpo_label_smoothing)
    leaves = {i: torch.tensor(thetas[i], requires_grad=True) for i in names}
    own = BatchOptions.of(config, actor.layout, actor.shape, actor.trained, actor.device, actor.role)
    for batch in build_micro_batches(shard, step, own, actor.layout):
        batch.fields = {name: value.double() for name, value in batch.fields.items()}
        batch.weights = batch.weights.double()
        whole = torch.cat([torch.zeros(0), *(leaves[names[i]] for i in batch.samples)]).double()
        log_probs = whole[batch.responses]
        loss, _ = micro_batch_loss(log_probs, -log_probs * 0.5, batch, options, compare=True)
        loss.backward()
    return {i: np.zeros(len(thetas[i])) if leaf.grad is None else leaf.grad.numpy() for i, leaf in leaves.items()}


# A whole batch on one rank, then the same divided: (layout, samples of a micro-batch).
DIVISIONS = [(TrainerLayout(1), 8), (TrainerLayout(1), 3), (TrainerLayout(2), 2), (TrainerLayout(2, cp=2), 3)]


def inputs_of(name):
    """Samples, and the log-probs of the policy now and of the one that acted."""
    samples = Samples(8, seed=61, share=2)
    random = np.random.default_rng(61)
    samples.mask[3][:] = 0.0  # one that trains nothing
    if name == "dpo":
        pairs_of(samples)
    olds = [-3.0 * random.random(n) for n in samples.response]
    thetas = [old + 0.3 * random.normal(size=old.size) for old in olds]
    samples.log_probs = [(old + 0.2 * random.normal(size=old.size)).astype(np.float32) for old in olds]
    return samples, thetas, olds


@pytest.fixture(scope="module")
def gradients(workers, hf):
    """Loss -> its gradient, or its error, in each of `DIVISIONS`. The ranks of a division start once for all losses."""
    folder, _ = hf("llama", True)
    found = {name: [] for name in LOSSES}
    for layout, micro in DIVISIONS:
        workers.start(config_of(folder), layout)
        for name, flags in LOSSES.items():
            samples, thetas, olds = inputs_of(name)
            config, shards = config_of(folder, **flags), samples.shards(layout.dp, 1, micro)
            try:
                ranks = workers.on_shards(gradients_of, shards, config, thetas, olds)
            except Failed as error:
                found[name].append(error)
            else:
                whole = [sum(rank.get(i, np.zeros(n)) for rank in ranks) for i, n in enumerate(samples.response)]
                found[name].append(np.concatenate(whole))
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_in_float64(gradients, name):
    errors = [one for one in gradients[name] if isinstance(one, Failed)]
    assert not errors, errors[0]
    whole, *others = gradients[name]
    assert np.linalg.norm(whole) > 1e-3 and np.isfinite(whole).all()
    if name == "dpo":
        assert np.abs(whole - dpo_by_autograd(*inputs_of(name))).max() < 1e-8
    for division, other in zip(DIVISIONS[1:], others, strict=True):
        assert np.linalg.norm(other - whole) <= 1e-9 * np.linalg.norm(whole), division


def dpo_by_autograd(samples, thetas, olds):
    """Gradient of the mean over pairs of -(1 - e) log sigmoid(0.3 h) - e log sigmoid(-0.3 h)."""
    leaves = [torch.tensor(theta, requires_grad=True) for theta in thetas]
    sums = [
        ((leaf - 0.9 * torch.tensor(old.astype(np.float32)).double()) * torch.tensor(mask)).sum()
        for leaf, old, mask in zip(leaves, olds, samples.mask, strict=True)
    ]
    whole = [i for i in range(0, len(sums), 2) if samples.mask[i].any() and samples.mask[i + 1].any()]
    assert len(whole) == 3
    margins = 0.3 * torch.stack([sums[i] - sums[i + 1] for i in whole])
    (-0.9 * logsigmoid(margins) - 0.1 * logsigmoid(-margins)).mean().backward()
    return np.concatenate([np.zeros(leaf.numel()) if leaf.grad is None else leaf.grad.numpy() for leaf in leaves])


@pytest.mark.parametrize("name", ["clip_cov", "dpo"])
def test_whole_steps_of_the_trainer(workers, hf, name):
    samples = Samples(8, seed=62, share=2)
    if name == "dpo":
        pairs_of(samples)
        samples.mask = [np.ones_like(mask) for mask in samples.mask]
    folder, values = hf("qwen3", False)[0], LOSSES[name] | NO_EXTRAS | {"micro": 2, "steps": 2}
    assert_as_on_one_rank(workers, folder, samples, TrainerLayout(2, cp=2), 1e-5, **values)


def at_the_edge() -> Samples:
    """Sample 1 is fully masked, 2 has an empty response, 3 lacks some of the engine's log-probs; 4 has reward 0."""
    samples = Samples(6, seed=66, low=20)
    samples.mask = [np.ones_like(mask) for mask in samples.mask]
    samples.mask[1][:] = 0.0
    samples.log_probs[1][:] = np.nan
    samples.tokens[2] = samples.tokens[2][: samples.total[2] - samples.response[2]]
    samples.total[2], samples.response[2] = samples.tokens[2].size, 0
    samples.mask[2] = samples.log_probs[2] = np.zeros(0, np.float32)
    samples.log_probs[3][:3] = [-np.inf, np.nan, np.inf]
    samples.rewards[4] = 0.0
    return samples


@pytest.mark.parametrize(
    "values",
    [
        LOSSES["rejection"] | {"use_tis": True, "rejection_high": 1e9},
        {"use_opsm": True, "use_kl_loss": True, "kl_loss_coef": 0.2, "use_unbiased_kl": True, "entropy_coef": 0.01},
        {"policy_loss": "gspo", "use_rollout_logprobs": True, **SEQUENCE},
        {"policy_loss": "kl_cov", "kl_cov_fraction": 0.1, "normalize_advantages": True},
        {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1},
    ],
    ids=str,
)
def test_samples_that_train_nothing_are_as_good_as_none(workers, hf, values):
    folder, _ = hf("llama", True)
    samples, found = at_the_edge(), []
    # They have no token, but the step's counts have them: what is left out below is not taken from the denominator.
    counts = [samples.count([0, 1, 2, 3]), samples.count([4, 5])]
    for groups in ([[0, 1], [2], [3, 4, 5]], [[0], [3, 4, 5]]):
        workers.start(config_of(folder, **values), TrainerLayout(1))
        steps = [[*groups[:-1], groups[-1][:1]], [groups[-1][1:]]]
        metrics = [workers.train([samples.shard(steps, counts)], TrainerLayout(1), i) for i in range(2)]
        found.append((metrics, workers.run(weights)))
    assert all(np.isfinite(list(metrics.values())).all() and not metrics["train/skipped"] for metrics in found[0][0])
    assert found[0][0][0]["train/logprob_not_finite"] > 0
    assert (found[0][0][0]["train/num_samples"], found[0][0][0]["train/masked_samples"]) == (6, 2)
    assert_same(found[0], found[1], 1e-6)


def pair_advantages_of(actor, shard, log_probs, reference):
    """(shard with its advantages, metrics) of a shard's first step."""
    from fusionrl.trainer.advantages import pair_advantages

    own, others = (np.concatenate([x[i] for i in shard.fields["sample_index"]]) for x in (log_probs, reference))
    shard.fields |= {"ref_log_probs": others, "advantages": np.zeros_like(own)}
    return shard, pair_advantages(shard, shard.steps[0], own, 0.3, 0.0)


def test_a_pair_without_a_log_prob_is_left_out_and_counted(workers, hf):
    samples = Samples(6, seed=65, low=25, share=2)
    pairs_of(samples)
    samples.mask = [np.ones_like(mask) for mask in samples.mask]
    samples.mask[2][0] = 0.0
    reference = [0.8 * part for part in samples.log_probs]
    reference[2][0] = -np.inf  # its token is not trained on
    reference[5][-1] = np.nan
    workers.start(config_of(hf("llama", True)[0], policy_loss="dpo"), TrainerLayout(2))
    for shard, metrics in workers.on_shards(pair_advantages_of, samples.shards(2), samples.log_probs, reference):
        assert metrics["pairs_excluded"] == 1.0 and metrics["num_pairs"] == 2.0 and np.isfinite(metrics["dpo_loss"])
        for index, part in zip(shard.fields["sample_index"], shard.split("advantages"), strict=False):
            assert np.isfinite(part).all()
            assert part.any() == (index < 4), "the third pair's answers have no gradient, wherever they are"


@pytest.mark.parametrize(
    ("by_hook", "built_in"),
    [
        ({"custom_policy_loss_path": "plain_gradient"}, {"policy_loss": "gpg"}),
        ({"custom_tis_function_path": "truncated"}, {"use_tis": True, "tis_clip": 1.5}),
        ({"custom_pg_loss_reducer_function_path": "by_constant"}, {"loss_aggregation": "constant", "loss_length": 40}),
    ],
    ids=str,
)
def test_a_users_parts_of_the_loss(workers, hf, by_hook, built_in):
    folder, _ = hf("llama", True)
    samples, common = Samples(7, seed=63), NO_EXTRAS | {"calculate_per_token_loss": "loss_length" not in built_in}
    one = history(workers, folder, samples, TrainerLayout(1), steps=2, **common, **built_in)
    paths = {name: f"{HOOKS}:{function}" for name, function in by_hook.items()}
    two = history(workers, folder, samples, TrainerLayout(2), micro=2, steps=2, **common, **paths)
    parted = history(workers, folder, samples, TrainerLayout(2, cp=2), micro=2, steps=2, **common, **paths)
    for other in (two, parted):
        assert_same(([], other[1]), ([], one[1]), 1e-5)
    for metrics, others in zip(two[0] + parted[0], one[0] * 2, strict=True):
        assert metrics["train/loss"] == pytest.approx(others["train/loss"], abs=1e-6)
    if "custom_tis_function_path" in by_hook:
        assert two[0][0]["train/mine"] == pytest.approx(one[0][0]["train/is_ratio"], rel=1e-5)


def test_a_correction_of_whole_responses_under_context_parallelism(workers, hf):
    """Slime's helpers, the weights of responses and what is reported of them: as with one rank."""
    values = {"custom_tis_function_path": f"{HOOKS}:sequence_weights", "calculate_per_token_loss": False, "steps": 2}
    folder, samples = hf("llama", True)[0], Samples(8, seed=66)
    one = assert_as_on_one_rank(workers, folder, samples, TrainerLayout(2, cp=2), 1e-5, **values)
    assert 0.1 < one[0][0]["train/kept"] < 0.9
    assert one[0][0]["train/weight"] != pytest.approx(1.0, abs=0.05)


def test_a_correction_of_log_probs_that_are_not_there(workers, hf):
    workers.start(config_of(hf("llama", True)[0], custom_tis_function_path=f"{HOOKS}:truncated"))
    (shard,) = Samples(3, seed=64).shards()
    del shard.fields["rollout_log_probs"]
    with pytest.raises(Failed, match="--custom-tis-function-path .*truncated: the rollout has no log-probs of the eng"):
        workers.train([shard])
