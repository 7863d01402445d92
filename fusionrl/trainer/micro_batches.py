"""Stage 4, pack: from a prepared shard to the micro-batches of an optimizer step, on the device."""

import numpy as np
import torch
from torch import Tensor

from fusionrl.algorithms.policy_losses import token_weights
from fusionrl.data.train_batch import FIELDS, TrainShard, TrainStep
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.image_rows import place_images, prompt_keys
from fusionrl.trainer.multi_token import look_ahead
from fusionrl.trainer.packed_batch import BatchOptions, MicroBatch, Selection
from fusionrl.trainer.packed_row import pack_row
from fusionrl.trainer.stages import Experts

_COLUMNS: dict[str, torch.dtype] = {
    "positions": torch.int64,
    "targets": torch.int64,
    "responses": torch.int64,
    "sequences": torch.int64,
    "weights": torch.float32,
    "sequence_shares": torch.float32,
}
_TOKEN_FIELDS = tuple(name for name, spec in FIELDS.items() if spec.extent == "response" and spec.dtype == np.float32)


def build_micro_batches(
    shard: TrainShard,
    step: TrainStep,
    options: BatchOptions,
    layout: TrainerLayout | None = None,
    experts: Experts | None = None,
) -> list[MicroBatch]:
    """All micro-batches of one optimizer step; at least one, for every rank takes part in its collectives.

    The plan gives all ranks the same number; the empty ones that the pipeline needs in addition come last.
    """
    groups = list(step.micro_batches) or [[]]
    if layout is not None:
        groups += [[]] * (round_up(len(groups), layout) - len(groups))
    return pack_groups(shard, groups, step, options, experts or {})


def pack_groups(
    shard: TrainShard, groups: list[list[int]], step: TrainStep | None, options: BatchOptions, experts: Experts
) -> list[MicroBatch]:
    """The micro-batches of these samples; where experts were recorded for the same samples, routers choose them."""
    batches = [build_micro_batch(shard, group, step, options) for group in groups]
    for batch in batches:
        batch.experts = experts.get(tuple(batch.samples), batch.experts)
    return batches


def round_up(count: int, layout: TrainerLayout) -> int:
    """The number of micro-batches that the pipeline runs for `count`: interleaved stages want a multiple of them."""
    return -(-count // layout.pp) * layout.pp if layout.vpp > 1 else count


def build_micro_batch(
    shard: TrainShard, samples: list[int], step: TrainStep | None, options: BatchOptions
) -> MicroBatch:
    """Pack `samples` of `shard`; without samples, one padding token whose loss weighs nothing.

    `step`: the optimizer step whose counts give the weights; None for weights of 0 (scoring).
    """
    tokens = shard.split("tokens")
    present = {name: shard.split(name) for name in _TOKEN_FIELDS if name in shard.fields}
    attempt_tokens = shard.fields.get("attempt_tokens")
    is_hot = options.has_sampled and "temperatures" in present
    if is_hot and options.whole_sequences:
        raise ValueError(
            "--loss-type custom_loss: samples were sampled at another temperature than --rollout-temperature, with"
            " which get_log_probs_and_entropy scores them; sample at that one, or set sample.temperature to None"
        )
    recorded = shard.split("rollout_routed_experts") if options.replay_layers is not None else []
    prompts = [int(shard.total_lengths[i] - shard.response_lengths[i]) for i in samples]
    row = pack_row([tokens[i] for i in samples], prompts, options, prompt_keys(shard, samples, prompts))
    if options.vision is not None:
        place_images(shard, samples, row, options)
    experts = row.experts([recorded[i] for i in samples] if recorded else [], options)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*_COLUMNS, *present)}
    response_lengths, first_response = [], 0
    for position, (i, prompt, places) in enumerate(zip(samples, prompts, row.rows, strict=False)):
        num_response, mask = int(shard.response_lengths[i]), present["loss_mask"][i]
        offsets = np.arange(num_response) if options.all_responses else np.flatnonzero(mask)
        columns["positions"].append(places[prompt - 1 + offsets])
        columns["targets"].append(tokens[i][prompt + offsets])
        columns["responses"].append(first_response + offsets)
        columns["sequences"].append(np.full(offsets.size, position))
        size = None if attempt_tokens is None else float(attempt_tokens[i])
        columns["weights"].append(_weights(mask, step, options, size)[offsets])
        columns["sequence_shares"].append(token_weights(mask, "sequence_mean", 0, 1, attempt_tokens=size)[offsets])
        for name, values in present.items():
            columns[name].append(values[i][offsets])
        response_lengths.append(num_response)
        first_response += num_response
    flat = {name: _join(parts, _COLUMNS.get(name, torch.float32)) for name, parts in columns.items()}
    chosen = torch.nonzero(row.local[flat["positions"]] >= 0)[:, 0]
    device = options.device
    depths = range(1, options.mtp_layers + 1) if step is not None else ()
    trained: list[np.ndarray] = []
    if depths:
        masks = present["loss_mask"]
        trained = [prompt + np.flatnonzero(masks[i]) for i, prompt in zip(samples, prompts, strict=True)]
    num_tokens = step.num_tokens if step is not None else 0

    def pick(name: str) -> Tensor:
        return flat[name][chosen].to(device)

    return MicroBatch(
        tokens=row.tokens,
        position_ids=row.position_ids,
        layout=row.layout,
        selection=Selection(
            positions=row.local[flat["positions"][chosen]].to(device),
            targets=pick("targets"),
            temperature=pick("temperatures") if is_hot else options.temperature,
            chunk_size=options.chunk_size,
            entropy_grad=options.entropy_grad,
            ahead=tuple(
                look_ahead(depth, row, [tokens[i] for i in samples], trained, num_tokens, device) for depth in depths
            ),
        ),
        weights=pick("weights"),
        sequence_shares=pick("sequence_shares"),
        fields={name: pick(name) for name in present},
        responses=flat["responses"][chosen],
        sequences=pick("sequences"),
        samples=list(samples),
        response_lengths=response_lengths,
        starts=[int(places[0]) if len(places) else 0 for places in row.rows[: len(samples)]],
        total_lengths=[int(shard.total_lengths[i]) for i in samples],
        num_tokens=num_tokens,
        num_samples=step.num_samples if step is not None else 0,
        experts=experts,
    )


def _join(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def _weights(mask: np.ndarray, step: TrainStep | None, options: BatchOptions, size: float | None) -> np.ndarray:
    if step is None:
        return np.zeros(mask.size)
    return token_weights(mask, options.aggregation, step.num_tokens, step.num_samples, options.constant, size)
