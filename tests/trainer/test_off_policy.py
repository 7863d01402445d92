"""The default loss under a pipeline that runs ahead is --use-tis: decoupled, by the engine's log-probs."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.buffer.rollout_stages import warn_without_log_probs
from fusionrl.config.config import Config
from fusionrl.data.sample import Sample
from fusionrl.data.train_batch import TrainShard
from fusionrl.rollout import weight_versions
from tests.trainer.trainer_worker import Failed, Samples, config_of

AHEAD = {"pipeline": "async", "rollout_batch_size": 6}


def shard_of(has_log_probs: bool = True) -> TrainShard:
    (shard,) = Samples(6, seed=21).shards(steps=2)
    if not has_log_probs:
        del shard.fields["rollout_log_probs"]
    return shard


def trained(workers, folder, shard: TrainShard, **values) -> tuple[dict[str, float], object]:
    workers.start(config_of(folder, lr=1e-2, **values))
    metrics = workers.train([shard])
    return metrics, workers.call("state_hashes")


def test_it_is_what_the_flag_does_bit_by_bit(workers, hf) -> None:
    folder, _ = hf("llama", True)
    by_default = trained(workers, folder, shard_of(), **AHEAD)
    assert by_default == trained(workers, folder, shard_of(), use_tis=True)
    # Two steps: the ratio is taken to log-probs of before the first, which are also those of the weights.
    assert by_default[0]["train/is_abs"] > 0.1 and np.isfinite(by_default[0]["train/is_ratio"])
    off, on_policy = trained(workers, folder, shard_of(), **AHEAD, use_tis=False), trained(workers, folder, shard_of())
    assert off == on_policy and off[1] != by_default[1]
    assert "train/is_ratio" not in off[0]


def test_without_the_engines_log_probs_only_the_flag_is_an_error(workers, hf) -> None:
    folder, _ = hf("llama", True)
    plain = trained(workers, folder, shard_of(has_log_probs=False), **AHEAD, use_tis=False)
    assert trained(workers, folder, shard_of(has_log_probs=False), **AHEAD) == plain
    with pytest.raises(Failed, match="--use-tis.*the rollout has no log-probs"):
        trained(workers, folder, shard_of(has_log_probs=False), **AHEAD, use_tis=True)


@pytest.mark.parametrize(
    ("values", "is_warned"), [(AHEAD, True), (AHEAD | {"use_tis": False}, False), ({"pipeline": "on-policy"}, False)]
)
def test_that_is_warned_of_once(values, is_warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_versions, "_warned", set())
    monkeypatch.setattr(weight_versions, "_warnings", [])
    config = Config.from_flat(values)
    whole = Sample(index=0, tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0])
    lacking = Sample(index=1, tokens=[1, 2], response_length=1)
    warn_without_log_probs([whole], config)
    assert weight_versions.take_warnings() == []
    for _ in range(2):
        warn_without_log_probs([whole, lacking], config)
    found = weight_versions.take_warnings()
    assert len(found) == is_warned
    assert not found or ("sample 1 has no rollout_log_probs" in found[0] and "--no-use-tis" in found[0])
