"""Routing replay: updates send each token to the recorded experts, whatever the routers have become."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import hf_models, routing, trainer_worker
from tests.trainer.test_train_hooks import CUSTOM
from tests.trainer.trainer_worker import Failed, Samples, config_of
from tools.parity import checkpoint_gradients

DISTURB = {"custom_megatron_before_train_step_hook_path": "tests.trainer.routing.disturb"}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SIZES = {"qwen3_moe": (4, 2), "mixtral": (4, 2), "deepseek_v3": (8, 4)}  # experts, topk
MIXTURES = {"qwen3_moe": [0, 1], "mixtral": [0, 1], "deepseek_v3": [1]}


def with_routing(shard, samples, family, num_layers=2, share=1):
    """The shard with random experts of every token, the same on any rank, and of a prompt's tokens in any sample."""
    num_experts, topk = SIZES[family]
    dense = [layer for layer in range(num_layers) if num_layers == 2 and layer not in MIXTURES[family]]

    def draw(num_tokens, *seed):
        scores = np.random.default_rng([5, *seed]).random((num_tokens, num_layers, num_experts))
        return scores.argsort(-1)[..., :topk].astype(np.int16)

    parts = []
    for i in shard.fields["sample_index"].tolist():
        length = samples.response[i]
        experts = np.concatenate([draw(samples.total[i] - length, i // share), draw(length, 0, i)])
        experts[-1] = -1
        experts[:, dense] = 0
        parts.append(experts)
    return replace(shard, fields=shard.fields | {"rollout_routed_experts": np.concatenate(parts)})


def maps(found, kind):
    # Interleaved stages also run micro-batches of one token, which fill up their number.
    return {layer: [one for one in passes if len(one) > 1] for (layer, name), passes in found.items() if name == kind}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_updates_choose_what_the_log_prob_pass_chose(workers, hf, family):
    """Three steps, and routers that others have disturbed by the second one; without the flag they choose otherwise."""
    folder, _ = hf(family, False)
    samples = Samples(9, seed=21, share=3)
    for replays in (True, False):
        workers.start(config_of(folder, use_routing_replay=replays, **DISTURB))
        workers.run(routing.watch)
        metrics = workers.train(samples.shards(1, steps=3, micro=2))
        (found,) = workers.run(routing.watched)
        before, updates = maps(found, "score"), maps(found, "update")
        assert sorted(before) == MIXTURES[family]
        if replays:
            np.testing.assert_equal(updates, before)
        else:
            changed = [np.mean(a != b) for layer in before for a, b in zip(before[layer], updates[layer], strict=True)]
            assert np.mean(changed[2:]) > 0.05
        assert 1e-3 < metrics["train/grad_norm"] < np.inf


@pytest.mark.parametrize(("sizes", "modules"), [({}, ["moe"]), ({"pp": 2, "vpp": 2}, None)], ids=["moe", "vpp"])
def test_what_is_recomputed_in_backward_is_of_its_own_micro_batch(workers, hf, sizes, modules):
    """With stages, forward passes of the next micro-batches run before a backward pass."""
    folder, _ = hf("qwen3_moe", False, num_hidden_layers=4)
    recompute = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else RECOMPUTE
    config = config_of(folder, passthrough={"transformer": recompute}, use_routing_replay=True, **DISTURB)
    workers.start(config, TrainerLayout(sizes.get("pp", 1), **sizes))
    workers.run(routing.watch)
    workers.train(Samples(10, seed=22, share=2).shards(1, steps=2, micro=1))
    layers = set()
    for found in workers.run(routing.watched):
        before = maps(found, "score")
        layers |= set(before)
        assert all(len(passes) == 10 for passes in before.values())
        np.testing.assert_equal(maps(found, "update"), before)
        np.testing.assert_equal(maps(found, "recomputed"), before)
    assert layers == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("family", "sizes", "passthrough", "by_engine"),
    [
        ("qwen3_moe", {"ep": 2}, {}, False),
        ("qwen3_moe", {"pp": 2}, RECOMPUTE, False),
        ("qwen3_moe", {"cp": 2}, {}, True),
        ("mixtral", {"tp": 2, "etp": 2}, {}, False),
        ("mixtral", {"tp": 2, "etp": 2}, {}, True),
        ("deepseek_v3", {"ep": 2}, {}, True),
        ("deepseek_v3", {"pp": 2, "vpp": 2}, RECOMPUTE, True),
    ],
    ids=str,
)
def test_layouts_agree(workers, hf, family, sizes, passthrough, by_engine):
    num_layers = 4 if sizes.get("vpp") else 2
    folder, _ = hf(family, False, num_hidden_layers=num_layers)
    samples = Samples(7, seed=23, share=3)
    flag = "use_rollout_routing_replay" if by_engine else "use_routing_replay"
    results = []
    for layout, fields in ((TrainerLayout(1), {}), (TrainerLayout(2, **sizes), passthrough)):
        workers.start(config_of(folder, passthrough={"transformer": fields}, **{flag: True}, **DISTURB), layout)
        shards = samples.shards(layout.dp, steps=2, micro=2)
        if by_engine:
            shards = [with_routing(shard, samples, family, num_layers, share=3) for shard in shards]
        metrics = workers.train(shards, layout)
        results.append((metrics, workers.run(trainer_worker.gradients)[0]))
    (want, reference), (got, gradients) = results
    assert {name: got[name] for name in want} == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert set(gradients) == set(reference)
    for name, value in reference.items():
        assert np.abs(gradients[name] - value).max() <= 2e-4 * np.abs(value).max() + 1e-7, name


def test_a_custom_loss_sees_whole_sequences_with_the_same_experts(workers, hf):
    """Its updates run over more tokens than a log-prob pass needs."""
    flags = CUSTOM | DISTURB | {"use_routing_replay": True, "use_kl_loss": True}
    workers.start(config_of(hf("qwen3_moe", False)[0], **flags), TrainerLayout(2, cp=2))
    workers.run(routing.watch)
    workers.train(Samples(6, seed=27, share=3).shards(1, steps=2))
    for found in workers.run(routing.watched):
        # The reference's pass comes first.
        before = {layer: passes[len(passes) // 2 :] for layer, passes in maps(found, "score").items()}
        np.testing.assert_equal(maps(found, "update"), before)


def test_nothing_changes_where_routing_would_not(workers, hf):
    folder, _ = hf("deepseek_v3", False)
    samples = Samples(6, seed=24, share=3)
    found = []
    for replays in (False, True):
        workers.start(config_of(folder, use_routing_replay=replays, lr=0.0))
        found.append((workers.train(samples.shards(1, steps=2)), workers.run(trainer_worker.gradients)))
    np.testing.assert_equal(*found)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_engines_experts_against_transformers(workers, hf, family):
    folder, model = hf(family, False)
    samples = Samples(5, seed=25)
    (shard,) = samples.shards(1, micro=5)
    shard = with_routing(shard, samples, family)
    workers.start(config_of(folder, use_rollout_routing_replay=True))
    (ours,) = workers.run(routing.scores, shard)
    workers.train([shard])
    gradients = workers.run(trainer_worker.gradients)[0]
    model = hf_models.clone(model)
    num_tokens, _ = samples.count(range(5))
    loss = torch.zeros(())
    for i, experts in enumerate(shard.split("rollout_routed_experts")):
        free = experts.copy()
        free[-1] = np.arange(free.shape[-1])  # of the last token, which no log-prob depends on
        with routing.forced(model, free[:, MIXTURES[family]]):
            log_probs, _ = hf_models.response_log_probs(model, samples, i)
        assert np.abs(ours[i] - log_probs.detach().numpy()).max() <= 2e-5
        # The first step's ratio is 1, so the loss is -advantage and its gradient -advantage * d log p.
        loss = loss - (torch.tensor(samples.mask[i]) * log_probs).sum() * float(samples.rewards[i]) / num_tokens
    loss.backward()
    wanted = checkpoint_gradients(model)
    assert set(gradients) == set(wanted)
    for name, gradient in wanted.items():
        assert np.abs(gradients[name] - gradient).max() <= 2e-4 * np.abs(gradient).max() + 1e-7, name


def test_experts_that_do_not_fit_are_refused(workers, hf):
    samples = Samples(3, seed=26)
    workers.start(config_of(hf("deepseek_v3", False)[0], use_rollout_routing_replay=True))
    (plain,) = samples.shards(1)
    good = with_routing(plain, samples, "deepseek_v3")
    experts = good.fields["rollout_routed_experts"]

    bad = experts.copy()
    bad[samples.total[0] + 1, 1] = [0, 3, 8, 1]
    for values, message in (
        (None, "the rollout's samples have no rollout_routed_experts"),
        (experts[:, :1], r"has 1 layers of 4 experts; the model has 2 layers \(those without experts count\) of 4"),
        (experts[:, :, :2], "has 2 layers of 2 experts"),
        (bad, r"of sample 1: token 1 has an expert outside 0 … 7 in layer 1 \(\[0, 3, 8, 1\]\)"),
        (np.zeros_like(experts), "of sample 0: token 0 has an expert twice in layer 1"),
    ):
        fields = plain.fields if values is None else plain.fields | {"rollout_routed_experts": values}
        with pytest.raises(Failed, match=message) as failure:
            workers.train([replace(plain, fields=fields)])
        assert failure.value.kind == "ValueError"
    assert np.isfinite(workers.train([good])["train/loss"])
