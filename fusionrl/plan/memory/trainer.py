"""Memory of the ranks of a group of trainers (actor, critic, process reward model), by pipeline stage."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from fusionrl.models.shape import ModelShape
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.memory.activations import (
    TowerMemory,
    TrainingOptions,
    chunk_bytes,
    kinds_of,
    layer_bytes,
    micro_batch_bytes,
    tower_memory,
)
from fusionrl.plan.memory.states import Bytes, StageParameters, StateOptions, stage_parameters, state_bytes


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank of a pipeline stage."""

    stage: int
    states: Bytes  # weights, gradients, optimizer
    activations: float  # what forward passes keep at the worst moment: `in_flight` micro-batches
    in_flight: float
    head: float  # of these, what the loss keeps (last stage)
    images: float  # of these, what the vision tower keeps: patches, inputs of its blocks, features (first stage)
    transient: float  # more that backward needs for a moment, and `transient_of` which part does: "head", "layer"
    transient_of: str
    placeholders: float  # bytes of `transient` that replace weights' gradients, see `_weight_gradients`
    scoring: float  # what a forward pass without gradients needs for a moment

    @property
    def training(self) -> float:
        """The peak of a training step."""
        return self.states.on_device + self.activations + self.transient


def in_flight(layout: TrainerLayout, stage: int, num_micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, all of its layers counted as one.

    1F1B (arXiv:2104.04473): pp - stage. Interleaved: stage s of pp with v chunks warms up with 2(pp - s - 1) +
    (v - 1)pp chunks and holds one more; for s = 0 that is pp · (1 + (pp - 1) / (pp · v)) micro-batches.
    """
    if layout.vpp == 1:
        return min(layout.pp - stage, num_micro_batches)
    chunks = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    return min(chunks / layout.vpp, num_micro_batches)


def even_stages(layout: TrainerLayout, num_layers: int) -> list[list[int]]:
    """Layers dealt out as evenly as they go: for a layout of stages that only Megatron reads."""
    bounds = [stage * num_layers // layout.pp for stage in range(layout.pp + 1)]
    return [list(range(bounds[stage], bounds[stage + 1])) for stage in range(layout.pp)]


def trainer_memory(
    shape: ModelShape,
    layout: TrainerLayout,
    options: TrainingOptions,
    states: StateOptions,
    transformer: Mapping[str, object],
    frozen: Set[str] = frozenset(),
) -> tuple[StageMemory, ...]:
    """Memory of a rank of each stage.

    transformer  passed-through fields for the TransformerConfig
    frozen       Megatron names of parameters that are not trained
    """
    stages = stage_layers(layout, shape.num_layers, transformer) or even_stages(layout, shape.num_layers)
    counted = stage_parameters(shape, layout, stages, frozen, options.adapters)
    tower = tower_memory(shape, layout, options, frozen)
    return tuple(
        _stage(shape, layout, options, states, transformer, stage, layers, parameters, tower)
        for stage, (layers, parameters) in enumerate(zip(stages, counted, strict=True))
    )


def _stage(
    shape: ModelShape,
    layout: TrainerLayout,
    options: TrainingOptions,
    states: StateOptions,
    transformer: Mapping[str, object],
    stage: int,
    layers: Sequence[int],
    parameters: StageParameters,
    tower: TowerMemory,
) -> StageMemory:
    tokens, is_last = options.tokens, stage == layout.pp - 1
    width, split = options.width, layout.tp if options.sequence_parallel else 1
    size = -(-len(layers) // layout.vpp)
    chunks = [layers[start : start + size] for start in range(0, len(layers), size)]
    sizes = [chunk_bytes(shape, layout, options, chunk) for chunk in chunks]
    flying = in_flight(layout, stage, options.num_micro_batches)
    # The inputs of a stage: token ids, or hidden states of the stage before, and the rotary table.
    entry = 8.0 if stage == 0 else 0.0
    of_layers = tokens * (sum(each for each, _ in sizes) + entry)
    of_layers += micro_batch_bytes(shape, layout, options, layers)
    saved = of_layers * flying
    live = tokens * max((again for _, again in sizes), default=0.0)
    images = tower.kept * flying + tower.cached if stage == 0 else 0.0
    saved += images
    rows = -(-shape.vocab_size // layout.tp)
    head = head_now = 0.0
    if is_last:
        # The last norm keeps its input and the normalised copy; the loss of the micro-batch that is worked on.
        head = tokens * (8 * shape.hidden_size + 4) / split
        if not shape.value_head:
            head_kept, head_now = head_bytes(shape, rows, options)
            head += head_kept
            if shape.mtp_layers:
                further, again = _further(shape, layout, options)
                head += shape.mtp_layers * (head_kept + tokens * further)
                live = max(live, tokens * again)
    # Backward has the gradients of gate, up and their product at once, where a layer is widest.
    rank = options.rank_sizes(layout)
    layer_now = live + tokens * 3 * width * max(mlp.widest(shape, rank) for mlp in set(shape.mlp))
    table = rows * shape.hidden_size  # of the embedding, and of the output layer
    largest, placeholders = _weight_gradients(states, options, parameters, transformer, table, is_last)
    layer_now += largest
    if stage == 0:  # the tower's backward comes last
        layer_now = max(layer_now, tower.again - of_layers, tower.flat - saved)
    transient_of = "head" if head_now > layer_now else "layer"
    # Without gradients a layer's tensors are given back as soon as they have been used: at most all of them.
    widths = (layer_bytes(shape, layout, options, kinds) for kinds in set(kinds_of(shape, layers)))
    scoring = tokens * max(widths, default=0.0)
    return StageMemory(
        stage=stage,
        states=state_bytes(parameters, layout, states),
        activations=saved + head,
        in_flight=flying,
        head=head,
        images=images,
        transient=max(head_now, layer_now) + placeholders,
        transient_of=transient_of,
        placeholders=placeholders,
        scoring=max(scoring, head_now if is_last else 0.0, tower.forward + tower.cached if stage == 0 else 0.0),
    )


def _further(shape: ModelShape, layout: TrainerLayout, options: TrainingOptions) -> tuple[float, float]:
    """(bytes a token that one layer of multi-token prediction keeps, bytes of what it computes again in backward)."""
    rank = options.rank_sizes(layout)
    hidden = shape.hidden_size / rank.split
    # Two norms before the projection of both, which reads them as one tensor, and a norm after the layer.
    around = 3 * rank.normed(hidden, rank.split) + 3 * hidden * rank.width
    kept = layer_bytes(shape, layout, options, shape.mtp_kinds) + around
    return (2 * hidden * rank.width, kept) if options.recompute.is_full else (kept, 0.0)


def head_bytes(shape: ModelShape, rows: int, options: TrainingOptions) -> tuple[float, float]:
    """(bytes that the loss keeps from forward to backward, bytes that it needs for a moment).

    Kept: the hidden states [T, h], some of the logits, the tokens' positions and targets (int64), log-sum-exp and
    entropy (fp32). For a moment: two blocks of logits in forward; in backward one (two with the entropy's gradient),
    the gradient of its input in fp32, and that of the output layer's weights, unless these are frozen.
    """
    tokens, hidden = options.tokens, shape.hidden_size
    if options.whole_logits:  # in fp32, and so is their gradient; a softmax between them
        return 4.0 * tokens * rows, 8.0 * tokens * rows
    columns, num_kept = block_sizes(tokens, hidden, rows, options.chunk_size)
    kept = tokens * (hidden * options.width + 4 * min(num_kept * columns, rows) + 8 + 8 + 4 + 4)
    block = 4 * tokens * columns
    backward = (1 + options.entropy_grad) * block + 4 * tokens * hidden
    backward += 0 if options.adapters is not None else options.width * rows * hidden
    return kept, max(2 * block, backward)


def _weight_gradients(
    states: StateOptions,
    options: TrainingOptions,
    parameters: StageParameters,
    transformer: Mapping[str, object],
    table: int,
    is_last: bool,
) -> tuple[float, float]:
    """(bytes of the largest gradient of a layer's weight, on its way into the buffer; bytes of placeholders).

    With --gradient-accumulation-fusion Transformer Engine adds gradients in place, and keeps a placeholder for each
    distinct size of a dense weight. The embedding's gradient (`table`) comes when all activations are gone.
    """
    sizes = set(parameters.dense) - {table}
    if transformer.get("gradient_accumulation_fusion") and options.impl == "transformer_engine":
        return 0.0, float((sum(sizes) + table * is_last) * states.weight_bytes)
    return float(max([*sizes, *parameters.expert], default=0) * states.weight_bytes), 0.0


BLOCK_BYTES = 32 << 20
KEPT_BYTES = 128 << 20


def block_sizes(num_tokens: int, hidden_size: int, num_rows: int, chunk_size: int | None = None) -> tuple[int, int]:
    """(rows of the output layer in one block, blocks that are kept for backward).

    A block is fp32 logits [num_tokens, rows]. The trainer's loss (`trainer/log_probs.py`) is cut by this function.

    num_rows    of the output layer on this rank, V/tp
    chunk_size  --log-probs-chunk-size; None: blocks of `BLOCK_BYTES`, of which `KEPT_BYTES` are kept
    """
    column_bytes = 4 * max(num_tokens, 1)
    if chunk_size is None:
        # Narrower than the hidden states, adding to their gradient would cost more than the products.
        width, kept_bytes = max(BLOCK_BYTES // column_bytes, hidden_size), KEPT_BYTES
    else:
        kept_bytes = 4 * chunk_size * num_rows
        width = kept_bytes // column_bytes
    width = min(max(width, 1), num_rows)
    return width, kept_bytes // (width * column_bytes)
