"""A critic's values, and further sets of weights that one model computes with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import hf_models, trainer_worker
from tests.trainer.test_parity import assert_close
from tests.trainer.trainer_worker import Samples, config_of
from tools.parity import checkpoint_gradients


def train_on_squares(actor, shard) -> float:
    """One backward pass of the sum of squared values; a stand-in for a critic's loss that needs nothing else."""
    from dataclasses import replace

    from fusionrl.trainer.forward import run_forward
    from fusionrl.trainer.micro_batches import build_micro_batches

    def squares(batch, output):
        loss = (output[0] ** 2).sum()
        return loss, torch.zeros((), dtype=torch.int), loss.detach()

    for chunk in actor.trained.chunks:
        chunk.zero_grad_buffer()
    batches = [
        batch
        for step in shard.steps
        for batch in build_micro_batches(shard, step, replace(actor.batch_options, all_responses=True), actor.layout)
    ]
    return float(sum(run_forward(actor.trained, batches, squares, forward_only=False)))


def critic_folder(folder, family):
    """A transformers model with a value head, random and saved."""
    torch.manual_seed(3)
    config = hf_models.config_of(family, True, num_labels=1)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("gate.weight"):
                param.normal_(std=0.5)
            if name == "score.weight":
                param.normal_(std=0.5)
    model.save_pretrained(folder)
    return model


def values_of(model, samples, i):
    """Values before each response token of sample i."""
    total, response = int(samples.total[i]), int(samples.response[i])
    hidden = model.model(torch.tensor(samples.tokens[i], dtype=torch.long)[None]).last_hidden_state[0]
    return model.score(hidden)[total - response - 1 : total - 1, 0]


LAYOUTS = [TrainerLayout(1), TrainerLayout(2, tp=2), TrainerLayout(2, pp=2), TrainerLayout(2, cp=2), TrainerLayout(2)]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_values_and_their_gradients_equal_transformers(workers, tmp_path, family):
    model = critic_folder(tmp_path / "critic", family)
    samples = Samples(6, seed=21)
    with torch.no_grad():
        want = [values_of(model, samples, i).numpy() for i in range(6)]
    loss = sum((values_of(model, samples, i) ** 2).sum() for i in range(6))
    loss.backward()
    gradients = checkpoint_gradients(model)
    layouts = LAYOUTS if family == "qwen3" else [TrainerLayout(2, tp=2, etp=2), TrainerLayout(2, ep=2)]
    for layout in layouts:
        workers.start(config_of(tmp_path / "critic"), layout, role="critic")
        got = workers.call("score", samples.shards()[0])
        for rank in got:
            for i in range(6):
                assert np.abs(rank[i] - want[i]).max() <= 1e-5, (layout, i)
        shards = samples.shards(layout.dp)
        per_rank = [(train_on_squares, shards[layout.dp_rank(rank)]) for rank in range(layout.world_size)]
        workers.run_each(per_rank)
        assert_close(workers.run(trainer_worker.gradients)[0], gradients, 1e-4)


def test_a_critic_starts_from_a_policy_and_is_saved(workers, hf, tmp_path):
    """Its head starts as zeros; what is saved has it under transformers' name, and a checkpoint holds it."""
    folder, _ = hf("qwen2", True)
    layout = TrainerLayout(2, tp=2)
    workers.start(config_of(folder), layout, role="critic")
    (shard,) = Samples(4, seed=2).shards()
    assert all(not np.any(values) for values in workers.call("score", shard)[0])
    workers.run(set_head, 0.25)
    values = workers.call("score", shard)[0]
    assert all(np.all(one) for one in values)
    workers.call("save", str(tmp_path / "checkpoint"), 0)
    workers.call("save_hf", str(tmp_path / "critic"))
    workers.run(set_head, 0.0)
    workers.call("load", str(tmp_path / "checkpoint"))
    assert all(map(np.array_equal, workers.call("score", shard)[0], values))
    workers.start(config_of(tmp_path / "critic"), layout, role="critic")
    assert all(map(np.array_equal, workers.call("score", shard)[0], values))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", num_labels=1)
    assert torch.equal(model.score.weight, torch.full((1, model.config.hidden_size), 0.25))


def set_head(actor, value: float) -> None:
    for chunk in actor.trained.chunks:
        for name, param in chunk.named_parameters():
            if name.endswith("value_head.weight"):
                param.data.fill_(value)
    actor.trained.optimizer.reload_model_params()


@pytest.mark.parametrize("layout", [TrainerLayout(1), TrainerLayout(2, pp=2)], ids=str)
def test_several_sets_of_weights(workers, hf, layout):
    """Reference, teacher and an older policy, each scored by the same model; what is trained stays bit by bit."""
    folder, _ = hf("qwen3", True)
    teacher, teacher_model = hf("qwen3", True, seed=11)
    samples = Samples(6, seed=7)
    (shard,) = samples.shards()
    workers.start(config_of(folder), layout)
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
    with torch.no_grad():
        for i, got in enumerate(workers.call("score", shard, "teacher")[0]):
            assert np.abs(got - hf_models.response_log_probs(teacher_model, samples, i)[0].numpy()).max() <= 1e-5
    assert workers.call("state_hashes") == before
    assert all(map(np.array_equal, workers.call("score", shard)[0], history[1]))
    assert not all(map(np.array_equal, history[0], history[1]))
