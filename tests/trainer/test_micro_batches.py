"""The stage pack: rows, shares of the loss, and one step after the other."""

from collections import Counter

import numpy as np
import pytest
import torch

from fusionrl.cpu import megatron_patches
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
    from fusionrl.trainer.micro_batches import BatchOptions, Slicing

    slicing = Slicing(**{name: values.pop(name) for name in ("cp_size", "cp_rank") if name in values})
    is_local = values.pop("local_attention", True)
    return BatchOptions(slicing, torch.device(values.pop("device", "cpu")), 1.0, None, is_local, **values)


def test_our_own_attention_is_for_short_sequences_on_a_cpu() -> None:
    from fusionrl.plan.memory.activations import LONGEST_ROW
    from fusionrl.trainer.packed_row import pack_row

    for length, values, is_ours in (
        (LONGEST_ROW, {}, True),
        (LONGEST_ROW + 1, {}, False),
        (9, {"device": "meta"}, False),
        (LONGEST_ROW // 4 * 4 - 1, {"cp_size": 2, "cp_rank": 0}, False),
        (9, {"local_attention": False}, False),
    ):
        row = pack_row([np.zeros(length + 1, np.int64), np.zeros(9, np.int64)], [1, 1], options(**values))
        assert (row.layout.table is not None) is is_ours, (length, values)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_attention_is_the_same_whoever_computes_it(workers, hf, family) -> None:
    workers.start(config_of(hf(family, True)[0]))
    workers.run(check_both_attentions, Samples(9, seed=3, share=3))


def check_both_attentions(actor, samples: Samples) -> None:
    """One micro-batch with its gradients by our kernel, and by torch's attention; and who it is by with dropout."""
    from fusionrl.cpu import kernels, row_functions
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

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        module.zero_grad_buffer()
        output = forward()
        output.sum().backward()
        return output.detach(), torch.cat([buffer.grad_data.flatten() for buffer in module.buffers]).clone()

    with pytest.MonkeyPatch.context() as patch:
        attend = row_functions.attend
        patch.setattr(row_functions, "attend", lambda *args: calls.append(1) or attend(*args))
        ours, num_ours = both(), [len(calls)]
        with pytest.MonkeyPatch.context() as dropping:
            for layer in layers:
                dropping.setattr(layer, "dropout", 0.1)
            for is_training in (True, False):
                module.train(is_training)
                forward()
                num_ours.append(len(calls))
        module.train()
        patch.setattr(kernels, "fit", lambda *tensors: False)
        theirs = both()
        num_ours.append(len(calls))
    assert num_ours == [len(layers), 0, len(layers), 0]
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).abs().max() < 1e-5 * other.abs().max() and other.any()


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma3_text"])
def test_no_gradient_leaves_its_sequence(workers, hf, family) -> None:
    """That of a loss on one sequence by the embeddings of the others is exactly 0."""
    workers.start(config_of(hf(family, True)[0]))
    workers.run(check_no_gradient_leaves_its_sequence, Samples(4, seed=5, low=30, high=90))


def check_no_gradient_leaves_its_sequence(actor, samples: Samples) -> None:
    from dataclasses import replace

    from fusionrl.trainer.micro_batches import build_micro_batch

    (shard,) = samples.shards(micro=4)
    batch = build_micro_batch(shard, list(range(4)), shard.steps[0], replace(actor.batch_options, share_prompts=False))
    (module,) = actor.trained.chunks
    (embedding,) = (part for name, part in module.named_modules() if name.endswith(".embedding"))
    embedded: list[torch.Tensor] = []
    handle = embedding.register_forward_hook(lambda _, __, output: embedded.append(output))
    logits = module(batch.tokens, batch.position_ids, None, packed_seq_params=batch.layout)
    handle.remove()
    start = 0
    for length in batch.layout.lengths:
        part = logits[0, start : start + length].float().square().sum()
        (grad,) = torch.autograd.grad(part, embedded, retain_graph=True)
        inside = grad[start : start + length]
        assert inside.flatten(1).any(1).all() and grad.count_nonzero() == inside.count_nonzero()
        start += length
    assert start == batch.tokens.size(1)


def test_a_micro_batch_of_samples_without_a_token(rank) -> None:
    rank(check_samples_without_tokens, Samples(3, seed=2))


def check_samples_without_tokens(actor, samples: Samples) -> None:
    """Samples that failed before they had a token may be all that a rank gets."""
    from fusionrl.trainer.micro_batches import build_micro_batch
    from fusionrl.trainer.packed_row import pack_row

    nothing = [np.zeros(0, np.int64)] * 2
    for chosen in (options(), options(share_prompts=False), options(whole_sequences=True)):
        row = pack_row(nothing, [0, 0], chosen)
        assert row.tokens.shape == (1, 1) and [len(places) for places in row.rows] == [0, 0]
    mixed = pack_row([*nothing, samples.tokens[0]], [0, 0, 1], options())
    assert np.array_equal(mixed.tokens[0].numpy(), samples.tokens[0][:-1])

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


def steps_taken(actor, shard) -> tuple[list[int], list[float]]:
    """(optimizer steps that were taken when each look ahead was asked, what of it is reported)."""
    from fusionrl.trainer import steps
    from fusionrl.trainer.shards import pull

    taken = []

    def look_ahead(shard, index: int, *_: object) -> dict[str, float]:
        taken.append(actor.trained.scheduler.num_steps)
        return {"num_pairs": 10.0 + index}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "look_ahead", look_ahead)
        reports, _ = steps.take_steps(actor._prepare(0, pull(shard)), actor.stepping, 0)
    return taken, [report.numbers["num_pairs"] for report in reports]


def test_a_look_ahead_sees_the_weights_after_the_step_before(rank) -> None:
    assert rank(steps_taken, Samples(6, seed=5).shards(steps=2, micro=2)[0]) == ([0, 1], [10.0, 11.0])


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
    from fusionrl.plan.balance import BatchPlan
    from fusionrl.trainer.micro_batches import build_micro_batches
    from tests.data.test_attempts import BALANCE, fanned
    from tests.plan.shards import build_shards

    samples = [*fanned([3, 1], [1, 0], 0, 4), *fanned([1, 2], [1, 0], 1, 3)]
    samples[1].loss_mask = [1, 0, 1, 0]
    values, totals, shares = [0.0] * len(samples), Counter(), 0.0
    for shard in build_shards(samples, values, values, BatchPlan(4, 1, 1, 4, dp), BALANCE, rollout_id=0):
        (step,) = shard.steps
        assert step.num_samples == 4 and step.num_tokens == 23
        for batch in build_micro_batches(shard, step, options(aggregation=kind, constant=10.0)):
            for sequence, weight in zip(batch.sequences.tolist(), batch.weights.tolist(), strict=True):
                index = int(shard.fields["sample_index"][batch.samples[sequence]])
                totals[index] += weight
            shares += float(batch.sequence_shares.sum())
    assert shares == pytest.approx(4)
    tokens = {0: 10, 1: 4, 10: 3, 11: 6}
    scale = {"sequence_mean": {i: 1 / (4 * n) for i, n in tokens.items()}, "token_mean": dict.fromkeys(tokens, 1 / 23)}
    scale["constant"] = dict.fromkeys(tokens, 1 / 40)
    assert totals == pytest.approx({i: n * scale[kind][i] for i, n in tokens.items()})
