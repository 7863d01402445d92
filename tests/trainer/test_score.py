"""The stages pull (a shard of its own, with other trainers' columns) and score (log-probs that are needed)."""

from types import SimpleNamespace

import numpy as np
import pytest

from fusionrl.cpu import megatron_patches
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.shards import columns_of, pull
from tests.trainer.trainer_worker import Samples, config_of


def scored(actor, shard, own: bool):
    """(columns that the stage added, the prefixes that hooks were told) on one rank."""
    from fusionrl.trainer.score import score

    prefixes = []
    hooks = SimpleNamespace(before_log_probs=lambda chunks, prefix: prefixes.append(prefix))
    found = score(pull(shard), actor.scorer, hooks, policy=own, records=False)
    assert found.experts == {}
    return {name: found.shard.fields[name] for name in found.shard.fields.keys() - shard.fields.keys()}, prefixes


@pytest.mark.parametrize("layout", [TrainerLayout(1), TrainerLayout(2, cp=2), TrainerLayout(2, pp=2)], ids=str)
def test_log_probs_of_policy_and_reference(workers, hf, layout):
    from tests.trainer.hf_models import all_log_probs  # not in the ranks

    folder, model = hf("qwen3", True)
    reference, reference_model = hf("qwen3", True, seed=3)
    samples = Samples(5, seed=31, share=2)
    workers.start(config_of(folder, ref_load=str(reference), use_kl_loss=True, kl_loss_coef=0.1), layout)
    (shard,), mask, wanted = samples.shards(micro=2), np.concatenate(samples.mask), {}
    for name, scorer in (("log_probs", model), ("ref_log_probs", reference_model)):
        wanted[name] = mask * all_log_probs(scorer, samples)
    for own in (True, False):
        for columns, prefixes in workers.run(scored, shard, own):
            assert prefixes == (["ref_", ""] if own else ["ref_"])
            assert set(columns) == ({"ref_log_probs", "log_probs"} if own else {"ref_log_probs"})
            for name, column in columns.items():
                assert np.abs(column - wanted[name]).max() < 1e-4, name
                assert (column[mask == 0] == 0).all()


def of_planned(actor, shard):
    from fusionrl.trainer.score import score_samples

    return score_samples(shard, actor.scorer, planned_only=True).flat, score_samples(shard, actor.scorer).flat


def test_samples_of_no_step_are_left_out_where_only_planned_ones_count(workers, hf):
    (shard,) = Samples(4, seed=32).shards(steps=2, micro=2)
    shard.steps = shard.steps[:1]
    workers.start(config_of(hf("llama", True)[0]))
    ((planned, every),) = workers.run(of_planned, shard)
    ends = np.cumsum(shard.response_lengths)
    assert np.allclose(planned[: ends[1]], every[: ends[1]], atol=1e-6) and planned[: ends[1]].any()
    assert not planned[ends[1] :].any() and every[ends[1] :].any()


@pytest.mark.parametrize(
    ("values", "num_steps", "wanted"),
    [
        ({}, 1, (False, False)),  # the step itself runs with these weights
        ({}, 2, (True, False)),
        ({"use_rollout_logprobs": True}, 2, (False, False)),
        ({"use_rollout_logprobs": True, "use_routing_replay": True}, 2, (True, True)),
        ({"use_routing_replay": True}, 1, (False, True)),
        ({"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1}, 1, (True, False)),
        ({"loss_type": "custom_loss", "custom_loss_function_path": "a.b"}, 1, (True, False)),
    ],
    ids=str,
)
def test_the_policys_log_probs_are_scored_where_they_are_needed(values, num_steps, wanted):
    megatron_patches.install()
    from fusionrl.trainer.loss import LossOptions
    from fusionrl.trainer.score import needed_log_probs

    config = config_of("model", **values)
    assert needed_log_probs(config, LossOptions.from_config(config), num_steps) == wanted


def test_columns_of_shards_that_are_cut_otherwise() -> None:
    samples = Samples(5, seed=2)
    parts = samples.shards(2)
    for shard in parts:
        shard.fields["values"] = shard.fields["rollout_log_probs"] * 2
        shard.fields["returns"] = shard.fields["loss_mask"] + 1
    (whole,) = samples.shards()
    pulled = pull(whole, [columns_of(shard, ("values", "returns")) for shard in parts])
    assert np.array_equal(pulled.fields["values"], whole.fields["rollout_log_probs"] * 2)
    assert np.array_equal(pulled.fields["returns"], whole.fields["loss_mask"] + 1)
    assert "values" not in whole.fields
    with pytest.raises(KeyError):  # of samples that nobody gave columns for
        pull(whole, [columns_of(parts[0], ("values",))])


def test_a_sample_without_a_prompt_is_named() -> None:
    (shard,) = Samples(4, seed=4).shards()
    shard.fields["sample_index"] = np.array([10, 11, 12, 13])
    shard.response_lengths[2] = shard.total_lengths[2]
    with pytest.raises(ValueError, match=r"sample 12 has \d+ tokens, all of them response"):
        pull(shard)
