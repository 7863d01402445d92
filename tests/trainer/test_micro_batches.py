"""The stage pack: rows, shares of the loss, and one step after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionrl.cpu import megatron_patches
from fusionrl.plan.layout import TrainerLayout
from tests.trainer.trainer_worker import Samples, config_of


@pytest.fixture(autouse=True, scope="module")
def megatron() -> None:
    """Let Megatron be imported on a CPU."""
    megatron_patches.install()


@pytest.fixture
def rank(workers, hf):
    """`rank(function, *args)` runs `function(actor, *args)` in a rank of its own."""
    workers.start(config_of(hf("llama", True)[0]))
    return lambda function, *args: workers.run(function, *args)[0]


def options(**values):
    from fusionrl.trainer.packed_batch import BatchOptions, Slicing

    slicing = Slicing(**{name: values.pop(name) for name in ("cp_size", "cp_rank") if name in values})
    is_local = values.pop("local_attention", True)
    return BatchOptions(slicing, torch.device(values.pop("device", "cpu")), 1.0, None, is_local, **values)


def test_a_micro_batch_has_what_its_samples_have() -> None:
    samples = Samples(6, seed=1, share=2)
    from fusionrl.trainer.micro_batches import build_micro_batch

    (shard,) = samples.shards(micro=2)
    step, chosen = shard.steps[0], [3, 1]
    batch = build_micro_batch(shard, chosen, step, options())
    row, masks = batch.tokens[0].numpy(), [samples.mask[i] > 0 for i in chosen]
    for i, start in zip(chosen, batch.starts, strict=True):
        assert row[start] == samples.tokens[i][0]
    targets = [samples.tokens[i][-len(mask) :][mask] for i, mask in zip(chosen, masks, strict=True)]
    assert np.array_equal(batch.selection.targets.numpy(), np.concatenate(targets))
    engine = [samples.log_probs[i][mask] for i, mask in zip(chosen, masks, strict=True)]
    assert np.array_equal(batch.fields["rollout_log_probs"].numpy(), np.concatenate(engine))
    assert batch.sequences.tolist() == [k for k, mask in enumerate(masks) for _ in range(mask.sum())]
    assert float(batch.sequence_shares.sum()) == pytest.approx(sum(mask.any() for mask in masks))
    every = build_micro_batch(shard, chosen, None, options(all_responses=True))
    assert every.weights.tolist() == [0.0] * int(sum(samples.response[i] for i in chosen))


def test_our_own_attention_is_for_short_sequences_on_a_cpu() -> None:
    from fusionrl.plan.memory.activations import LONGEST_ROW
    from fusionrl.trainer.packed_row import pack_row

    def table(length: int, **values: object) -> object:
        layout = pack_row([np.zeros(length + 1, np.int64), np.zeros(9, np.int64)], [1, 1], options(**values)).layout
        return layout.table

    assert table(LONGEST_ROW) is not None
    assert table(LONGEST_ROW + 1) is None
    assert table(9, device="meta") is None
    assert table(LONGEST_ROW // 4 * 4 - 1, cp_size=2, cp_rank=0) is None
    assert table(9, local_attention=False) is None


def test_attention_is_the_same_whoever_computes_it(rank) -> None:
    rank(check_both_attentions, Samples(9, seed=3, share=3))


def check_both_attentions(actor, samples: Samples) -> None:
    """One micro-batch with its gradients by our kernel, and by torch's attention; and who it is by with dropout."""
    from fusionrl.cpu import kernels, row_attention
    from fusionrl.trainer.local_attention import SDPACoreAttention
    from fusionrl.trainer.micro_batches import build_micro_batch

    (shard,) = samples.shards(micro=9)
    batch = build_micro_batch(shard, list(range(9)), shard.steps[0], options())
    (module,) = actor.trained.chunks
    layers = [part for part in module.modules() if isinstance(part, SDPACoreAttention)]
    calls = []

    def forward() -> torch.Tensor:
        calls.clear()
        return module(batch.tokens, batch.position_ids, None, labels=batch.selection, packed_seq_params=batch.layout)

    def both() -> tuple[torch.Tensor, torch.Tensor, int]:
        module.zero_grad_buffer()
        output = forward()
        output.sum().backward()
        gradients = torch.cat([buffer.grad_data.flatten() for buffer in module.buffers])
        return output.detach(), gradients.clone(), len(calls)

    with pytest.MonkeyPatch.context() as patch:
        attend = row_attention.attend
        patch.setattr(row_attention, "attend", lambda *args: calls.append(1) or attend(*args))
        *ours, num_ours = both()
        for layer in layers:
            patch.setattr(layer, "dropout", 0.1)
        forward()
        num_dropping = len(calls)
        module.eval()
        try:
            forward()
        finally:
            module.train()
        num_in_eval = len(calls)
        for layer in layers:
            patch.setattr(layer, "dropout", 0.0)
        patch.setattr(kernels, "fit", lambda *tensors: False)
        *theirs, num_theirs = both()
    assert (num_ours, num_dropping, num_in_eval, num_theirs) == (len(layers), 0, len(layers), 0)
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).abs().max() < 1e-5 * other.abs().max() and other.any()


def test_an_empty_micro_batch_weighs_nothing() -> None:
    from fusionrl.trainer.micro_batches import build_micro_batch

    (shard,) = Samples(3, seed=2).shards()
    batch = build_micro_batch(shard, [], shard.steps[0], options())
    assert batch.tokens.shape == (1, 1) and batch.samples == [] and batch.weights.numel() == 0


def test_a_micro_batch_of_samples_without_a_token(rank) -> None:
    """Samples that failed before they had a token may be all that a rank gets."""
    rank(check_samples_without_tokens, Samples(3, seed=2))


def check_samples_without_tokens(actor, samples: Samples) -> None:
    from fusionrl.trainer.packed_row import pack_row

    nothing = [np.zeros(0, np.int64)] * 2
    for chosen in (options(), options(share_prompts=False), options(whole_sequences=True)):
        row = pack_row(nothing, [0, 0], chosen)
        assert row.tokens.shape == (1, 1) and [len(places) for places in row.rows] == [0, 0]
    mixed = pack_row([*nothing, samples.tokens[0]], [0, 0, 1], options())
    assert np.array_equal(mixed.tokens[0].numpy(), samples.tokens[0][:-1])

    from fusionrl.trainer.micro_batches import build_micro_batch

    for i in range(2):
        samples.tokens[i], samples.total[i], samples.response[i] = np.zeros(0, np.int32), 0, 0
        samples.mask[i] = samples.log_probs[i] = np.zeros(0, np.float32)
    (shard,) = samples.shards()
    for chosen in ([0, 1], [0, 2, 1]):
        for how in (options(), options(whole_sequences=True), options(all_responses=True)):
            batch = build_micro_batch(shard, chosen, shard.steps[0], how)
            assert batch.samples == chosen and batch.starts == [0] * len(chosen)

    batch = build_micro_batch(shard, [0, 1], shard.steps[0], options())
    (module,) = actor.trained.chunks
    output = module(batch.tokens, batch.position_ids, None, labels=batch.selection, packed_seq_params=batch.layout)
    output.sum().backward()
    assert not any(buffer.grad_data.any() for buffer in module.buffers)


def test_only_a_cpu_attends_with_a_mask_to_leave_out_a_long_prompt() -> None:
    from fusionrl.trainer.packed_row import pack_row

    sequences = [np.concatenate([np.arange(300), np.full(20, i)]) for i in range(3)]
    for device, has_mask in (("cpu", True), ("meta", False)):  # "meta" stands for every device but a CPU
        row = pack_row(sequences, [300] * 3, options(device=device))
        assert row.local.numel() == 300 + 3 * 19, "the prompt is computed once on both"
        assert any(bucket.mask is not None for bucket in row.layout.buckets) is has_mask


def test_the_ranks_of_a_row_have_all_of_it() -> None:
    from fusionrl.trainer.packed_row import pack_row

    samples = Samples(5, seed=5, share=2)
    prompts = [int(total - response) for total, response in zip(samples.total, samples.response, strict=True)]
    whole = pack_row(samples.tokens, prompts, options(share_prompts=False))
    parts = [pack_row(samples.tokens, prompts, options(cp_size=2, cp_rank=rank)) for rank in range(2)]
    places = np.concatenate([part.held.numpy() for part in parts])
    assert sorted(places) == list(range(parts[0].local.numel())), "each place is on one rank"
    row = np.zeros(places.size, np.int64)
    row[places] = np.concatenate([part.tokens[0].numpy() for part in parts])
    for tokens, mine, others in zip(samples.tokens, whole.rows, parts[0].rows, strict=True):
        assert np.array_equal(whole.tokens[0].numpy()[mine], tokens[:-1]), "the last token predicts nothing"
        assert np.array_equal(row[others], tokens[:-1])
    # A shared prompt stands there once, and positions go on after it.
    shared = pack_row(samples.tokens, prompts, options())
    assert shared.local.numel() < whole.local.numel()
    for tokens, mine in zip(samples.tokens, shared.rows, strict=True):
        assert np.array_equal(shared.tokens[0].numpy()[mine], tokens[:-1])
        assert np.array_equal(shared.position_ids[0].numpy()[mine], np.arange(tokens.size - 1))
    entire = pack_row(samples.tokens, prompts, options(whole_sequences=True))
    assert entire.tokens.numel() == sum(tokens.size for tokens in samples.tokens)


def test_experts_of_the_engine_stand_at_their_tokens() -> None:
    from fusionrl.trainer.packed_row import pack_row

    samples, random = Samples(4, seed=4, share=2), np.random.default_rng(4)
    prompts = [int(total - response) for total, response in zip(samples.total, samples.response, strict=True)]
    recorded = [random.integers(0, 8, (int(total), 3, 2)).astype(np.int16) for total in samples.total]
    row = pack_row(samples.tokens, prompts, options(cp_size=2, cp_rank=0))
    assert row.experts(recorded, options()) is None and row.experts([], options(replay_layers=[0])) is None
    found = row.experts(recorded, options(replay_layers=[2, 0])).numpy()
    padding = np.ones(row.held.numel(), bool)
    for experts, places in zip(recorded, row.rows, strict=True):
        here = row.local.numpy()[places]
        assert np.array_equal(found[here[here >= 0]], experts[: places.size, [2, 0]][here >= 0])
        padding[here[here >= 0]] = False
    assert padding.any() and (found[padding] == -1).all()


class Watch:
    """In place of a look ahead: notes when it is asked, and sets a column."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def at(self, shard, index: int, experts) -> dict[str, float]:
        self.asked.append(index)
        shard.fields["selected"] = np.full(int(shard.response_lengths.sum()), index, np.float32)
        return {"num_pairs": 10.0 + index}


def test_steps_are_packed_one_after_the_other() -> None:
    from fusionrl.trainer.micro_batches import pack_steps
    from fusionrl.trainer.stages import Prepared

    (shard,) = Samples(6, seed=5).shards(steps=2, micro=2)
    recorded = {tuple(group): torch.tensor([k]) for k, group in enumerate(shard.steps[1].micro_batches)}
    watch = Watch()
    packed = pack_steps(Prepared(shard, recorded), options(), TrainerLayout(1), watch)
    assert watch.asked == [], "the step before is taken first"
    first = next(packed)
    assert watch.asked == [0] and first.look_ahead == {"num_pairs": 10.0}
    (second,) = list(packed)
    assert [first.index, second.index] == [0, 1] and second.step is shard.steps[1]
    for one in (first, second):
        assert [batch.samples for batch in one.batches] == one.step.micro_batches
        assert sum(float(batch.weights.sum()) for batch in one.batches) == pytest.approx(1.0), "a mean over tokens"
        assert all((batch.fields["selected"] == one.index).all() for batch in one.batches)
    assert [batch.experts for batch in first.batches] == [None, None]
    assert [int(batch.experts) for batch in second.batches] == [0, 1]


@pytest.mark.parametrize(
    ("prompt", "response", "gain", "on_a_cpu", "on_a_gpu"),
    [
        (256, 1024, 10232 / 8440, False, False),
        (256, 512, 6136 / 4344, True, True),
        (9, 32, 320 / 257, True, False),  # short prompts need no mask on a CPU: they are shared for less
        (3, 32, 272 / 251, False, False),
    ],
)
def test_prompts_are_shared_where_it_saves_enough(prompt, response, gain, on_a_cpu, on_a_gpu):
    """Eight samples of one prompt; docs/results/performance.md has their times."""
    from fusionrl.trainer.packed_row import pack_row, sharing_gain

    random = np.random.default_rng(prompt)
    head = random.integers(0, 100, prompt)
    sequences = [np.concatenate([head, random.integers(0, 100, response)]) for _ in range(8)]
    assert sharing_gain(sequences, [prompt] * 8) == pytest.approx(gain)
    for device, shares in (("cpu", on_a_cpu), ("meta", on_a_gpu)):
        row = pack_row(sequences, [prompt] * 8, options(device=device))
        whole = 8 * (prompt + response - 1)
        assert row.local.numel() == (whole - 7 * prompt if shares else whole)
        assert (row.layout.positions is not None) == shares
    assert pack_row(sequences, [prompt] * 8, options(share_prompts=False)).layout.positions is None


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("kind", ["sequence_mean", "token_mean", "constant"])
def test_the_weights_of_a_step_count_attempts(kind: str, dp: int) -> None:
    """Whatever rank a sample of an attempt is on: sequence_mean gives every attempt the same sum of weights."""
    from fusionrl.plan.batch import BatchPlan
    from fusionrl.trainer.micro_batches import build_micro_batches
    from tests.data.test_attempts import BALANCE, fanned
    from tests.plan.shards import build_shards

    samples = [*fanned([3, 1], [1, 0], 0, 4), *fanned([1, 2], [1, 0], 1, 3)]
    samples[1].loss_mask = [1, 0, 1, 0]
    values = [0.0] * len(samples)
    totals: dict[int, float] = {}
    shares = 0.0
    for shard in build_shards(samples, values, values, BatchPlan(4, 1, 1, 4, dp), BALANCE, rollout_id=0):
        (step,) = shard.steps
        assert step.num_samples == 4 and step.num_tokens == 23
        for batch in build_micro_batches(shard, step, options(aggregation=kind, constant=10.0)):
            for sequence, weight in zip(batch.sequences.tolist(), batch.weights.tolist(), strict=True):
                index = int(shard.fields["sample_index"][batch.samples[sequence]])
                totals[index] = totals.get(index, 0.0) + weight
            shares += float(batch.sequence_shares.sum())
    assert shares == pytest.approx(4)
    tokens = {0: 10, 1: 4, 10: 3, 11: 6}
    scale = {"sequence_mean": {i: 1 / (4 * n) for i, n in tokens.items()}, "token_mean": dict.fromkeys(tokens, 1 / 23)}
    scale["constant"] = dict.fromkeys(tokens, 1 / 40)
    assert totals == pytest.approx({i: n * scale[kind][i] for i, n in tokens.items()})
