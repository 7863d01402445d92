"""Pipelines that run ahead: their default loss is --use-tis; what is older than the bound is not trained."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fusionrl.buffer.rollout_stages import warn_without_log_probs
from fusionrl.buffer.stream_state import check_bound
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.data.sample_json import samples_of
from fusionrl.data.train_batch import TrainShard
from fusionrl.pipeline.knobs import Knobs
from fusionrl.plan.balance import Balance, BatchPlan
from fusionrl.plan.costs import SequenceCost
from fusionrl.rollout import weight_versions
from fusionrl.trainer.steps import check_equal, check_staleness
from tests.plan.shards import build_shards
from tests.trainer.trainer_worker import Failed, Samples, config_of

AHEAD = {"pipeline": "async", "rollout_batch_size": 6}


@pytest.fixture
def trained(workers, hf) -> Callable[..., tuple[dict[str, float], object]]:
    """(metrics, state) after two steps."""

    def train(has_log_probs: bool = True, **values) -> tuple[dict[str, float], object]:
        (shard,) = Samples(6, seed=21).shards(steps=2)
        if not has_log_probs:
            del shard.fields["rollout_log_probs"]
        workers.start(config_of(hf("llama", True)[0], lr=1e-2, **values))
        return workers.train([shard]), workers.call("state_hashes")

    return train


def test_it_is_what_the_flag_does_bit_by_bit(trained) -> None:
    by_default = trained(**AHEAD)
    assert by_default == trained(use_tis=True)
    # Two steps: the ratio is taken to log-probs of before the first, which are also those of the weights.
    assert by_default[0]["train/is_abs"] > 0.1 and np.isfinite(by_default[0]["train/is_ratio"])
    off = trained(**AHEAD, use_tis=False)
    assert off == trained() and off[1] != by_default[1]
    assert "train/is_ratio" not in off[0]


def test_without_the_engines_log_probs_only_the_flag_is_an_error(trained) -> None:
    assert trained(False, **AHEAD) == trained(False, **AHEAD, use_tis=False)
    with pytest.raises(Failed, match="--use-tis.*the rollout has no log-probs"):
        trained(False, **AHEAD, use_tis=True)


@pytest.mark.parametrize(
    ("values", "is_warned"), [(AHEAD, True), (AHEAD | {"use_tis": False}, False), ({"pipeline": "on-policy"}, False)]
)
def test_that_is_warned_of_once(values, is_warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_versions, "_warned", set())
    monkeypatch.setattr(weight_versions, "_warnings", [])
    config = Config.from_flat(values)
    whole = Sample(index=0, tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0])
    lacking = Sample(index=1, tokens=[1, 2], response_length=1)
    for samples in ([whole], [whole, lacking], [whole, lacking]):
        warn_without_log_probs(samples, config)
    found = weight_versions.take_warnings()
    assert len(found) == is_warned
    assert not found or ("sample 1 has no rollout_log_probs" in found[0] and "--no-use-tis" in found[0])


# --- the bound on staleness, at the optimizer ---
KNOBS = Knobs(groups_per_fetch=4, max_staleness=2, admission_lead=0.5)


def aged(versions: list[list[int]], masks: list[list[int]] | None = None) -> TrainShard:
    tokens: dict[str, Any] = {"tokens": [1, 2, 3, 4, 5], "response_length": 3, "rollout_log_probs": [-1.0] * 3}
    samples = [
        Sample(index=10 + i, group_index=i // 2, loss_mask=mask, weight_versions=own, **tokens)
        for i, (own, mask) in enumerate(zip(versions, masks or [[1, 1, 1]] * len(versions), strict=True))
    ]
    return built(samples, [0.0] * len(samples), [0.0] * len(samples))


def built(samples: list[Sample], *rewards: list[float]) -> TrainShard:
    balance = Balance(SequenceCost(linear=1.0, quadratic=0.0), 4096, 2)
    return build_shards(samples, *rewards, BatchPlan(len(samples), 1, 1, len(samples), 1), balance, rollout_id=7)[0]


def check(shard: TrainShard, rollout_id: int = 7, knobs: Knobs = KNOBS) -> None:
    for step in shard.steps:
        check_staleness(shard, step, rollout_id, knobs)


def test_as_old_as_the_bound_is_trained_and_one_older_is_not() -> None:
    check(aged([[5, 6, 7], [7, 7, 7], [5, 5, 5], [-1, -1, 7]]))
    named = r"sample 13 of prompt 1 has token 1 of its response of version 3.*4 versions"
    with pytest.raises(HookError, match=named):
        check(aged([[5, 6, 7], [7, 7, 7], [5, 5, 5], [4, 3, 7]]))


def test_tokens_that_are_not_trained_may_be_older() -> None:
    check(aged([[0, 6, 7], [7, 7, 7]], [[0, 1, 1], [1, 1, 1]]))


def test_versions_are_pushes_not_rollouts() -> None:
    """With a push after four rollouts, rollout 7 is of the second version, and so are tokens named 4 to 7."""
    stream = Knobs(groups_per_fetch=4, update_weights_interval=4)
    check(aged([[4, 4, 4], [4, 4, 4]]), knobs=stream)
    with pytest.raises(HookError, match="1 versions later"):
        check(aged([[4, 4, 4], [4, 0, 4]]), knobs=stream)


def test_a_token_that_passes_the_buffer_is_refused_before_the_step(workers, hf) -> None:
    """A user's conversion runs after the Buffer's check; it brings other versions than those that were checked."""
    random = Samples(4, seed=3)
    versions = [[7] * int(n) for n in random.response]
    group = [
        Sample(index=i, group_index=20, tokens=random.tokens[i], response_length=len(own), weight_versions=own)
        for i, own in enumerate(versions)
    ]
    check_bound([group], 7, KNOBS)
    data = {
        "tokens": random.tokens,
        "response_lengths": random.response.tolist(),
        "rewards": random.rewards.tolist(),
        "sample_indices": [0, 1, 2, 3],
        "rollout_log_probs": random.log_probs,
        "weight_versions": [*versions[:2], [*versions[2][:-1], 3], versions[3]],
    }
    samples, rewards, raw, _ = samples_of(data, group, "--custom-convert-samples-to-train-data-path")
    shard = built(samples, rewards, raw)
    shard.fields["loss_mask"] = np.ones_like(shard.fields["loss_mask"])
    folder, _ = hf("llama", True)
    workers.start(config_of(folder, pipeline="async", rollout_batch_size=4))
    before = workers.call("state_hashes")
    named = r"--max-staleness 2: sample 2 of prompt 20 has token \d+ of its response of version 3, and rollout 7"
    with pytest.raises(Failed, match=named) as caught:
        workers.train([shard], rollout_id=7)
    assert caught.value.kind == "HookError" and "the samples that it was at: 2" in caught.value.message
    assert workers.call("state_hashes") == before
    workers.start(config_of(folder))  # one rollout after the other has no bound: a resumed part may be of any age
    assert workers.train([shard], rollout_id=7)["train/skipped"] == 0


# --- --bitwise: the trainers' log-probs are the engine's, bit by bit ---
def test_a_log_prob_that_differs_names_step_sample_and_token() -> None:
    shard = aged([[7, 7, 7], [7, 7, 7]])
    engine = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0, -3.0])
    fields = {"rollout_log_probs": engine, "loss_mask": torch.tensor([1.0, 1, 1, 1, 1, 0])}
    # The second sample comes first in the micro-batch.
    sequences, responses = torch.tensor([0, 0, 0, 1, 1, 1]), torch.arange(6)
    batch: Any = SimpleNamespace(
        fields=fields, sequences=sequences, responses=responses, samples=[1, 0], response_lengths=[3, 3]
    )
    last = engine.clone()
    last[5] = -9.0  # of a token that is not trained
    check_equal(shard, "step 1", True, batch, last)
    other = engine.clone()
    other[4] = torch.nextafter(other[4], torch.zeros(()))
    check_equal(shard, "step 1", False, batch, other)  # the weights have moved
    with pytest.raises(RuntimeError, match=r"--bitwise: step 1: sample 10, token 1 of its.*\(1 of 5 tokens"):
        check_equal(shard, "step 1", True, batch, other)
    fields["current"] = torch.tensor([1.0, 1, 1, 1, 0, 1])  # older weights sampled that one
    check_equal(shard, "step 1", True, batch, other)
    fields["log_probs"] = engine - torch.tensor([1e-6, 0, 0, 0, 0, 0])
    with pytest.raises(RuntimeError, match=r"step 2: sample 11, token 0 .*log-prob before the steps"):
        check_equal(shard, "step 2", False, batch, None)
    with pytest.raises(RuntimeError, match="no log-probs of the engine"):
        check_equal(shard, "step 1", True, SimpleNamespace(fields={}), None)  # type: ignore[arg-type]
