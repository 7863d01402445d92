"""Hold the memory estimate of `fusionrl plan` against Megatron-core: parameter bytes by rank, and autograd's tensors.

    python tools/memory_check.py [--states] [--activations] [--step] [--published] [--only TEXT ...] [--json FILE]

--states       For every layout of tools/parity.py and every rank of it: builds Megatron's real model, its data-parallel
               buffers and its distributed optimizer, and counts their bytes. Parameters and buffers must be equal.
--activations  For layers of every kind, without, with selective and with full recompute: runs the real layers and
               counts the storages that autograd keeps. Within 2 %; vision towers, counted as a whole, within 10 %.
--step         Whole training steps on one rank, also with images: the peak of what torch allocates, and the
               estimate's. Within 10 %.
--published    The estimate of layouts whose peaks on GPUs others have published. Nothing runs.

Without a choice: all of them. All ranks are in this process: a process group that only pretends to communicate gives
each rank its part of the model. Exit code 1 where a bound is passed. Three minutes on two cores.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.config.config import Config, PassThrough
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.memory.activations import (
    LONGEST_ROW,
    Recompute,
    TrainingOptions,
    chunk_bytes,
    micro_batch_bytes,
    tower_memory,
)
from fusionrl.plan.memory.states import StateOptions, stage_parameters, state_bytes
from fusionrl.plan.memory.trainer import StageMemory, trainer_memory
from fusionrl.plan.trained_parts import adapters_of, frozen_of
from fusionrl.plan.trainer_plan import trainer_plan
from tests.tiny_vision import random_image, raw_config
from tools import published_peaks
from tools.parity_rows import COMMON, KNOWN_AS, LORA, MODELS, ROWS, SEEING, Row, without_adapters

BOUND, TOWER_BOUND, STEP_BOUND, PUBLISHED_BOUND = 0.02, 0.10, 0.10, 0.05
_HEAD = {
    "states": "| model | layout | ranks | parameters of a rank, bytes | buffers | optimizer | equal |\n"
    "|---|---|---|---|---|---|---|",
    "activations": "| layer | recompute | kept of a layer, bytes a token | estimate | difference |\n"
    "|---|---|---|---|---|",
    "step": "| model | recompute | states, MiB | estimate | peak, MiB | estimate | difference |\n"
    "|---|---|---|---|---|---|---|",
    "published": "| model | layout | stage | peak, GiB | estimate, GiB | difference |\n|---|---|---|---|---|---|",
}


def import_megatron() -> None:
    """Megatron-core on this machine's CPU, as trainers import it."""
    warnings.filterwarnings("ignore")
    from fusionrl.cpu import megatron_patches
    from fusionrl.trainer import megatron_core

    megatron_patches.install()
    import megatron.core  # noqa: F401 (patched right after)

    megatron_patches.patch()
    megatron_core.without_te()


def become(layout: TrainerLayout, rank: int) -> None:
    """Make this process rank `rank` of `layout`, alone: what others would send is undefined."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def build(
    shape: ModelShape, layout: TrainerLayout, rank: int, precision: str, passthrough: PassThrough, **flags: Any
) -> tuple[Config, list[Any], Any]:
    """(configuration, model chunks, TransformerConfig) of one rank: Megatron's real model, with random weights.

    What the flags do not train is frozen, and adapters are attached, before anything is wrapped.
    """
    import torch

    from fusionrl.trainer import lora, model

    become(layout, rank)
    values = {"mode": "sft", "precision": precision, "train_num_threads": 1, "lr": 1e-3}
    config = Config.from_flat(values | flags, passthrough)
    modules, transformer = model.build_model(config, shape, trainer_plan(config, layout), torch.device("cpu"))
    model.randomize(modules)
    model.freeze(modules, shape, frozen_of(config, shape))
    if (spec := adapters_of(config, shape)) is not None:
        lora.attach(modules, transformer, shape, spec, 1)
    return config, modules, transformer


# ----------------------------------------------------------------------------------------------- states


def counted_states(row: Row, shape: ModelShape, rank: int, precision: str) -> dict[str, int]:
    """Bytes of a rank as Megatron has them; `weights` with those that are in no buffer."""
    import torch

    from fusionrl.trainer import model

    passthrough = PassThrough(transformer=row.transformer, ddp=row.ddp)
    config, modules, transformer = build(shape, row.layout, rank, precision, passthrough, **row.flags)
    parameters = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    trained = model.build_training(config, modules, transformer, trainer_plan(config, row.layout))
    buffers = [b for chunk in trained.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    optimizer, held = 0, {b.param_data.untyped_storage().data_ptr() for b in buffers}
    for inner in trained.optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups if inner.optimizer is not None else ():  # None: it trains nothing
            for param in group["params"]:
                state = inner.optimizer.state[param].values()
                tensors = [value for value in state if isinstance(value, torch.Tensor)]
                # In fp32 the shard is a view of the model's own parameter.
                shard = [] if param.untyped_storage().data_ptr() in held else [param]
                optimizer += sum(t.numel() * t.element_size() for t in (*tensors, *shard))
    frozen = sum(p.nbytes for module in modules for p in module.parameters() if not p.requires_grad)
    return {
        "parameters": parameters,
        "weights": sum(b.param_data.nbytes for b in buffers) + frozen,
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "optimizer": optimizer,
    }


def _is_chosen(columns: str, only: Sequence[str]) -> bool:
    """Return whether a row with these columns is to be checked: all are, where no text is given."""
    return not only or any(text in columns for text in only)


def check_states(only: Sequence[str], report: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """A dictionary for each model on one rank, in fp32 and bf16, and for each layout of tools/parity.py."""
    import_megatron()
    alone = [(Row(name, 1), precision) for name in (*MODELS, *SEEING, *LORA) for precision in ("fp32", "bf16")]
    frozen = Row("qwen3_5", 1, note="frozen", flags={"freeze_vision": True, "freeze_params_name_list": ["A_log"]})
    rows = [*alone, (frozen, "bf16"), *((row, "fp32") for row in ROWS)]
    results = []
    for row, precision in rows:
        name = f"{row.name.removeprefix(', ') or 'one rank'}{'' if precision == 'fp32' else ', bf16'}"
        if not _is_chosen(f"{row.model} {name}", only):
            continue
        results.append(_states_of(row, name, precision))
        report(results[-1])
    return results


def _states_of(row: Row, name: str, precision: str) -> dict[str, Any]:
    shape, layout = parity_shape(row.model), row.layout
    # Tiny buckets would be padding for the most part.
    row = replace(row, ddp={**row.ddp, "bucket_size": None}, flags=LORA.get(row.model, {}) | row.flags)
    padding = 512 * (layout.vpp - 1)  # each further chunk of a rank has buffers of its own
    stages = stage_layers(layout, shape.num_layers, row.transformer)
    assert stages is not None
    config = Config.from_flat({"mode": "sft"} | row.flags)
    counted = stage_parameters(shape, layout, stages, frozen_of(config, shape), adapters_of(config, shape))
    options = StateOptions.of(precision, {}, row.ddp)
    estimates = [state_bytes(parameters, layout, options) for parameters in counted]
    least: list[int] = []
    is_equal, worst, total, sizes = True, 0.0, 0, []
    for rank in range(layout.world_size):
        measured = counted_states(row, shape, rank, precision)
        stage = layout.coordinates(rank).pp
        want = estimates[stage]
        weight_bytes = counted[stage].count * options.weight_bytes
        weight_bytes += sum(counted[stage].exact + counted[stage].frozen_exact) * (4 - options.weight_bytes)
        is_equal &= measured["parameters"] == weight_bytes
        over = measured["weights"] - want.weights, measured["gradients"] - want.gradients
        is_equal &= all(0 <= count <= padding for count in over)
        # Where a buffer ends in padding, the rank that has it holds less: the estimate is that of the others.
        is_equal &= measured["optimizer"] <= want.optimizer
        worst = max(worst, (want.optimizer - measured["optimizer"]) / want.optimizer)
        total += measured["optimizer"]
        sizes.append(measured["parameters"])
        least.append(measured["weights"])
    replicas = {"dense": layout.dp * layout.cp, "expert": layout.expert_dp}
    per_stage = layout.world_size // layout.pp
    expected_total = sum(
        options.optimizer_bytes * (sum(p.dense + p.exact + p.shared) * per_stage // replicas["dense"])
        + options.optimizer_bytes * (sum(p.expert) * per_stage // replicas["expert"])
        - (options.optimizer_bytes - options.of_fp32.optimizer_bytes) * sum(p.exact) * per_stage // replicas["dense"]
        for p in counted
    )
    is_equal &= total == expected_total  # of all ranks together the optimizer is exact
    return {
        "model": row.model,
        "layout": name,
        "ranks": layout.world_size,
        "parameters": sorted(set(sizes)),
        "buffers": sorted(set(least)),
        "optimizer_over": worst,
        "holds": bool(is_equal),
    }


def parity_shape(name: str) -> ModelShape:
    """The shape of a model of tools/parity.py, read from the config.json that transformers writes."""
    from transformers import AutoConfig

    name = without_adapters(name)
    if name in SEEING:
        return seeing_shape(name.split()[0], **SEEING[name])
    family, sizes = name.split()[0], COMMON | {"tie_word_embeddings": False} | MODELS[name]
    config = AutoConfig.for_model(KNOWN_AS.get(family, family), **sizes)
    return shape_from_hf_config(config.to_dict() | {"model_type": family})


def seeing_shape(kind: str, **sizes: int) -> ModelShape:
    """The shape of a model that sees, with its tower."""
    return shape_from_hf_config(raw_config(kind, **sizes), sees=True)


def states_line(entry: dict[str, Any]) -> str:
    """One row of the table."""
    parameters = " / ".join(str(size) for size in entry["parameters"])
    buffers = " / ".join(str(size) for size in entry["buffers"])
    return (
        f"| {entry['model']} | {entry['layout']} | {entry['ranks']} | {parameters} | {buffers} |"
        f" at most {entry['optimizer_over']:.1%} over | {'yes' if entry['holds'] else 'NO'} |"
    )


# ------------------------------------------------------------------------------------------ activations

_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 320,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 56,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 72,
    "q_lora_rank": 104,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 24,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 176,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 176}
_CHOSEN = {"num_experts_per_tok": 2, "intermediate_size": 176}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 4,
}
LAYERS: dict[str, dict[str, Any]] = {
    "llama: attention and MLP": {"model_type": "llama"},
    "llama, no grouped queries": {"model_type": "llama", "num_key_value_heads": 8},
    "qwen3: attention with q/k norms, MLP": {"model_type": "qwen3"},
    "glm4: output norms": {"model_type": "glm4"},
    "qwen3_moe: mixture of experts": {"model_type": "qwen3_moe", "norm_topk_prob": True, **_EXPERTS},
    "qwen2_moe: with a shared expert": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 208, **_EXPERTS},
    "deepseek_v3: latent attention, MLP": {"model_type": "deepseek_v3", **_LATENT, "first_k_dense_replace": 99},
    "deepseek_v3: latent attention, mixture": {"model_type": "deepseek_v3", **_LATENT, "first_k_dense_replace": 0},
    "olmo2: q/k norms over all heads, output norms alone": {"model_type": "olmo2"},
    "smollm3: without rotary embeddings": {"model_type": "smollm3", "no_rope_layer_interval": 1},
    "gpt_oss: windows and sinks, mixture with biases": {"model_type": "gpt_oss", "num_local_experts": 8, **_CHOSEN},
    "minimax_m2: mixture": {"model_type": "minimax_m2", "num_local_experts": 8, **_CHOSEN},
    "gemma3_text: windows, norms on both sides": {"model_type": "gemma3_text", "sliding_window": 32},
    "qwen3_5_text: a gated delta net": {"model_type": "qwen3_5_text", **_DELTA, "full_attention_interval": 99},
    "qwen3_5_text: gated attention": {"model_type": "qwen3_5_text", **_DELTA, "full_attention_interval": 1},
    "qwen3_next: gated delta nets, gated attention, mixture with a shared expert": {
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 208,
        **_EXPERTS,
        **_DELTA,
        "full_attention_interval": 2,
    },
    "short_conv: a kind of a plug-in": {"model_type": "short_conv", "conv_size": 3},
}
_TOWER = {"tower": 256, "depth": 6}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@dataclass(frozen=True)
class LayerCase:
    """One measurement: a layer, Megatron's recompute flags, parallel sizes, sequences of a micro-batch."""

    layer: str
    recompute: str
    transformer: dict[str, Any] = field(default_factory=dict)
    layout: TrainerLayout = field(default_factory=lambda: TrainerLayout(1))
    lengths: tuple[int, ...] = (129,)
    precision: str = "fp32"
    lora_rank: int = 0

    @property
    def name(self) -> str:
        sizes = {axis: getattr(self.layout, axis) for axis in ("tp", "cp", "ep", "etp")}
        parts = [self.layer, *(f"{axis.upper()} {size}" for axis, size in sizes.items() if size > 1)]
        parts += [f"{len(self.lengths)} sequences"] if len(self.lengths) > 1 else []
        parts += ["long"] if max(self.lengths) - 1 > LONGEST_ROW else []
        parts += [f"lora {self.lora_rank}"] if self.lora_rank else []
        return ", ".join(parts + (["bf16"] if self.precision == "bf16" else []))

    @property
    def flags(self) -> dict[str, Any]:
        return {"lora_rank": self.lora_rank}


def layer_cases() -> Iterator[LayerCase]:
    """Every layer without, with selective (what Megatron's flag means for it) and with full recompute; then others."""
    for layer, raw in LAYERS.items():
        modules = ["core_attn"]
        has_experts = "mixture" in layer or "expert" in layer
        modules += ["moe"] if has_experts else ["mlp"]
        yield LayerCase(layer, "none")
        yield LayerCase(layer, "core_attn", {"recompute_granularity": "selective"})
        yield LayerCase(layer, modules[1], _selective(modules[1]))
        yield LayerCase(layer, "layernorm", _selective("layernorm"))
        if raw["model_type"] == "deepseek_v3":
            yield LayerCase(layer, "mla_up_proj", _selective("mla_up_proj"))
        if raw["model_type"] == "deepseek_v3" and has_experts:
            yield LayerCase(layer, "shared_experts", _selective("shared_experts"))
        yield LayerCase(layer, "full", FULL)
    for layer in list(LAYERS)[:3] + list(LAYERS)[6:7]:  # torch's attention, for longer sequences
        yield LayerCase(layer, "none", {}, lengths=(LONGEST_ROW + 18,))
    qwen, moe, mla = list(LAYERS)[2], list(LAYERS)[4], list(LAYERS)[6]
    delta, gated = (f"qwen3_5_text: {kind}" for kind in ("a gated delta net", "gated attention"))
    yield LayerCase(qwen, "core_attn", {"recompute_granularity": "selective"}, lengths=(LONGEST_ROW + 18,))
    yield LayerCase(mla, "mla_up_proj", _selective("mla_up_proj"), lengths=(LONGEST_ROW + 18,))
    yield LayerCase(qwen, "none", {}, lengths=(LONGEST_ROW + 18,) * 2)
    yield LayerCase(qwen, "none", {}, lengths=(LONGEST_ROW + 18,), precision="bf16")
    yield LayerCase(mla, "none", {}, lengths=(LONGEST_ROW + 18,), precision="bf16")
    yield LayerCase(qwen, "full, block of 1", FULL | {"recompute_method": "block"})
    yield LayerCase(qwen, "none", {}, TrainerLayout(2, tp=2))
    yield LayerCase(qwen, "none", {"sequence_parallel": False}, TrainerLayout(2, tp=2))
    yield LayerCase(qwen, "full", FULL, TrainerLayout(2, tp=2))
    yield LayerCase(qwen, "none", {}, TrainerLayout(2, cp=2))
    yield LayerCase(qwen, "none", {}, lengths=(129, 129))
    yield LayerCase(qwen, "none", {}, precision="bf16")
    yield LayerCase(moe, "none", {}, TrainerLayout(2, tp=2, etp=2))
    yield LayerCase(moe, "none", {}, TrainerLayout(2, ep=2))
    yield LayerCase(moe, "none", {}, TrainerLayout(4, tp=2, ep=2, etp=2))
    yield LayerCase(mla, "none", {}, TrainerLayout(2, tp=2))
    yield LayerCase(mla, "none", {}, TrainerLayout(2, cp=2))
    yield LayerCase(mla, "none", {}, precision="bf16")
    for layer in (qwen, moe, mla):
        yield LayerCase(layer, "none", lora_rank=16)
    yield LayerCase(qwen, "none", lora_rank=16, precision="bf16")
    yield LayerCase(qwen, "full", FULL, lora_rank=16)
    yield LayerCase(moe, "moe", _selective("moe"), lora_rank=16)
    yield LayerCase(qwen, "none", {}, TrainerLayout(2, tp=2), lora_rank=16)
    yield LayerCase(moe, "none", {}, TrainerLayout(2, ep=2), lora_rank=16)
    for layer in (delta, gated):
        yield LayerCase(layer, "none", {}, lengths=(LONGEST_ROW + 18,))
        yield LayerCase(layer, "none", {}, lengths=(129, 129))
        yield LayerCase(layer, "none", {}, TrainerLayout(2, tp=2))
        yield LayerCase(layer, "none", {}, TrainerLayout(2, cp=2))


def kept_bytes(case: LayerCase, num_layers: int) -> tuple[float, int, float]:
    """(bytes that autograd keeps of a forward pass, tokens of the rank's row, tokens of experts over an even share)."""
    import torch

    from fusionrl.trainer.micro_batches import BatchOptions as MicroBatchOptions
    from fusionrl.trainer.micro_batches import Slicing, build_micro_batch

    shape, layout = layer_shape(case, num_layers), case.layout
    passthrough = PassThrough(transformer=case.transformer)
    _, modules, transformer = build(shape, layout, 0, case.precision, passthrough, **case.flags)
    slicing = Slicing(layout.cp, 0, layout.tp if transformer.sequence_parallel else 1, 0)
    sharing = shape.may_share_prompts
    options = MicroBatchOptions(slicing, torch.device("cpu"), 1.0, None, True, share_prompts=sharing)
    shard = _shard(case.lengths, shape.vocab_size)
    batch = build_micro_batch(shard, list(range(len(case.lengths))), shard.steps[0], options)
    (module,) = modules
    routed = 0

    def count(_: Any, inputs: tuple[Any, ...], __: Any) -> None:
        nonlocal routed
        routed += inputs[0].size(0)

    experts = [part for name, part in module.named_modules() if name.endswith("mlp.experts")]
    hooks = [part.register_forward_hook(count) for part in experts]
    with saved_storages(module) as saved:
        module.train()
        output = module(batch.tokens, batch.position_ids, None, labels=batch.selection, packed_seq_params=batch.layout)
    assert output.requires_grad
    for hook in hooks:
        hook.remove()
    tokens = batch.tokens.size(1)
    split = layout.tp if transformer.sequence_parallel else 1
    even = len(experts) * tokens / split * layout.etp * (shape.mixture.topk if shape.mixture else 1)
    # Storages freed at the end of the forward pass (recomputed outputs) have a size of 0 by now.
    return sum(storage.nbytes() for storage in saved.values()), tokens, routed / even if experts else 1.0


@contextmanager
def saved_storages(module: Any) -> Iterator[dict[int, Any]]:
    """Collect the storages that autograd keeps meanwhile, but for the module's own."""
    import torch

    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage  # alive, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def measure_tower(kind: str, recompute: str) -> dict[str, Any]:
    """Bytes a patch that a tower keeps, wide enough that heads are a small part; with its features, which follow."""
    import torch

    from fusionrl.trainer.vision_tower import TOWERS, PixelScale

    shape, sizes = seeing_shape(kind, **_TOWER, layers=6), ((16, 16), (12, 20))
    assert shape.vision is not None
    tower = TOWERS[type(shape.vision)](shape.vision, PixelScale(), recompute == "blocks")
    pictures = [random_image(i, *size, patch=shape.vision.patch_size) for i, size in enumerate(sizes)]
    with saved_storages(tower) as saved:
        features, deep = tower([torch.from_numpy(picture) for picture in pictures])
    patches = sum(columns * rows for columns, rows in sizes)
    measured = sum(part.nbytes for part in (*deep, features)) + sum(storage.nbytes() for storage in saved.values())
    again = recompute == "blocks"
    options = TrainingOptions("local", "fp32", True, 64, tokens=patches, max_patches=patches, recomputes_vision=again)
    estimate = tower_memory(shape, TrainerLayout(1), options, frozenset()).kept
    return {
        "layer": f"{kind}: vision tower",
        "recompute": recompute,
        "measured": measured / patches,
        "estimate": estimate / patches,
        "difference": estimate / measured - 1,
        "holds": abs(estimate / measured - 1) <= TOWER_BOUND,
    }


def layer_shape(case: LayerCase, num_layers: int) -> ModelShape:
    return shape_from_hf_config(_SIZES | LAYERS[case.layer] | {"num_hidden_layers": num_layers})


def _shard(lengths: Sequence[int], vocab_size: int, prompt_length: int = 1) -> TrainShard:
    total = np.array(lengths, np.int32)
    response, count = total - prompt_length, len(lengths)
    random = np.random.default_rng(0)
    return TrainShard(
        rollout_id=0,
        total_lengths=total,
        response_lengths=response,
        fields={
            "tokens": random.integers(0, vocab_size, int(total.sum())).astype(np.int32),
            "loss_mask": np.ones(int(response.sum()), np.float32),
            "rewards": np.zeros(count, np.float32),
            "raw_rewards": np.zeros(count, np.float32),
            "sample_index": np.arange(count),
            "group_index": np.arange(count),
            "truncated": np.zeros(count, np.bool_),
        },
        steps=[TrainStep([list(range(count))], int(response.sum()), count)],
    )


def measure_layer(case: LayerCase) -> dict[str, Any]:
    """Bytes a token that one more layer keeps, against the estimate; a block of recomputed layers by its whole."""
    # The difference drops the parts of a model outside the layers (embedding, last norm, loss).
    first, second = 2, 4
    shallow, tokens, imbalance_one = kept_bytes(case, first)
    two, _, imbalance_two = kept_bytes(case, second)
    measured = (two - shallow) / tokens / (second - first)
    routed = (second * imbalance_two - first * imbalance_one) / (second - first)
    longest = max(case.lengths) - 1
    estimate = []
    for num_layers in (first, second):
        options = TrainingOptions(
            impl="local",
            precision=case.precision,
            on_cpu=True,
            longest=longest,
            recompute=Recompute.of(case.transformer),
            sequence_parallel=case.transformer.get("sequence_parallel", True),
            imbalance=routed,
            own_attention=True,
            adapters=adapters_of(Config.from_flat(case.flags), layer_shape(case, num_layers)),
        )
        of_layers = layer_shape(case, num_layers), case.layout, options, range(num_layers)
        estimate.append(chunk_bytes(*of_layers)[0] + micro_batch_bytes(*of_layers) / tokens)
    expected = (estimate[1] - estimate[0]) / (second - first)
    difference = expected / measured - 1
    return {
        "layer": case.name,
        "recompute": case.recompute,
        "measured": measured,
        "estimate": expected,
        "difference": difference,
        "holds": abs(difference) <= BOUND,
    }


def check_activations(only: Sequence[str], report: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """A dictionary for each of `layer_cases`."""
    import_megatron()
    results = []
    for case in layer_cases():
        if _is_chosen(f"{case.name} {case.recompute}", only):
            results.append(measure_layer(case))
            report(results[-1])
    for kind in ("qwen2_5_vl", "qwen3_vl", "kimi_vl"):
        for recompute in ("none", "blocks"):
            if _is_chosen(f"{kind}: vision tower {recompute}", only):
                results.append(measure_tower(kind, recompute))
                report(results[-1])
    return results


def activations_line(entry: dict[str, Any]) -> str:
    """One row of the table."""
    return (
        f"| {entry['layer']} | {entry['recompute']} | {entry['measured']:.0f} | {entry['estimate']:.0f} |"
        f" {entry['difference']:+.2%}{'' if entry['holds'] else ' (OVER)'} |"
    )


# ------------------------------------------------------------------------------------------------- step

_STEP = _SIZES | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 16000}
_STEP_EXPERTS = _STEP | {"model_type": "qwen3_moe", "norm_topk_prob": True, **_EXPERTS, "moe_intermediate_size": 512}
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3 | none": (_STEP | {"model_type": "qwen3"}, {}),
    "qwen3 | full": (_STEP | {"model_type": "qwen3"}, FULL),
    "qwen3, 1000 tokens in the vocabulary | none": (_STEP | {"model_type": "qwen3", "vocab_size": 1000}, {}),
    "qwen3_moe | none": (_STEP_EXPERTS, {}),
    "qwen3_moe | moe": (_STEP_EXPERTS, _selective("moe")),
}


def check_step(only: Sequence[str], report: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """A dictionary for each of STEPS: two micro-batches of one sequence, all but its first token trained on.

    Of models that see, half of these tokens are an image's.
    """
    import_megatron()
    results = []
    cases = {name: (*case, 0) for name, case in STEPS.items()}
    cases |= {f"{name}, lora": (*STEPS[name], 16) for name in ("qwen3 | none", "qwen3 | full", "qwen3_moe | none")}
    for name, (raw, transformer, rank) in cases.items():
        if _is_chosen(name, only):
            measured = measure_step(shape_from_hf_config(raw), transformer, lora_rank=rank)
            results.append({"name": name} | measured)
            report(results[-1])
    for kind in ("qwen2_5_vl", "qwen3_vl", "kimi_vl"):
        shape = seeing_shape(kind, **_TOWER, layers=4, hidden=512, ffn=1536)
        for tower, flags in {"tower trained": {}, "tower frozen": {"freeze_vision": True}}.items():
            if _is_chosen(name := f"{kind}, images, {tower} | none", only):
                results.append({"name": name} | measure_step(shape, {}, **flags))
                report(results[-1])
    return results


def measure_step(shape: ModelShape, passed: dict[str, Any], num_tokens: int = 1024, **flags: Any) -> dict[str, Any]:
    """The peak of a training step by torch's own record of its allocations, and the estimate."""
    import torch
    from torch.autograd.profiler import profile

    from fusionrl.trainer import model
    from fusionrl.trainer.loss import LossOptions
    from fusionrl.trainer.micro_batches import BatchOptions as MicroBatchOptions
    from fusionrl.trainer.micro_batches import Slicing, build_micro_batch
    from fusionrl.trainer.steps import StepLoss, train_step

    layout, device, count = TrainerLayout(1), torch.device("cpu"), 2
    config, modules, transformer = build(shape, layout, 0, "fp32", PassThrough(transformer=passed), **flags)
    frozen = frozen_of(config, shape)
    trained = model.build_training(config, modules, transformer, trainer_plan(config, layout))
    shard = _shard([num_tokens + 1] * count, shape.vocab_size)
    if (vision := shape.vision) is not None:
        grid = (1, 32, num_tokens * vision.merge**2 // 64)  # half of the tokens
        spans = [[(1, str(i), grid)] for i in range(count)]
        pictures = {str(i): random_image(i, grid[2], grid[1], patch=vision.patch_size) for i in range(count)}
        shard.fields["tokens"].reshape(count, -1)[:, 1 : 1 + num_tokens // 2] = vision.image_token
        shard = replace(shard, spans=spans, images=pictures)
    step = TrainStep([[i] for i in range(count)], shard.steps[0].num_tokens, count)
    options = MicroBatchOptions(Slicing(), device, 1.0, None, True, vision=vision, runs_tower=vision is not None)
    batches = [build_micro_batch(shard, [i], step, options) for i in range(count)]
    buffers = [b for chunk in trained.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    states = sum(b.param_data.nbytes + b.grad_data.nbytes for b in buffers)
    states += sum(p.nbytes for module in modules for p in module.parameters() if not p.requires_grad)
    for inner in trained.optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                values = inner.optimizer.state[param].values()
                states += sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    with profile(profile_memory=True) as record:
        train_step(trained, batches, StepLoss(LossOptions(mode="sft")), device)
    events = sorted(
        (event for event in record.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    top = int(np.cumsum([event.nbytes() for event in events]).max())
    recompute, adapters = Recompute.of(passed), adapters_of(config, shape)
    work = TrainingOptions(
        impl="local",
        precision="fp32",
        on_cpu=True,
        longest=num_tokens,
        recompute=recompute,
        own_attention=True,
        adapters=adapters,
        tokens=num_tokens,
        num_micro_batches=count,
        max_patches=None if vision is None else num_tokens * vision.merge**2 // 2,
    )
    (memory,) = trainer_memory(shape, layout, work, StateOptions.of("fp32", {}, {}), passed, frozen)
    # What stands anyway would hide an error of the rest.
    difference = (memory.training - memory.states.on_device) / top - 1
    return {
        "states": states,
        "states_estimate": memory.states.on_device,
        "peak": states + top,
        "estimate": memory.training,
        "difference": difference,
        "of_total": memory.training / (states + top) - 1,
        "holds": abs(memory.training / (states + top) - 1) <= STEP_BOUND,
    }


def step_line(entry: dict[str, Any]) -> str:
    """One row of the table."""
    sizes = (entry["states"], entry["states_estimate"], entry["peak"], entry["estimate"])
    cells = " | ".join(f"{size / 2**20:.1f}" for size in sizes)
    without = f"{entry['of_total']:+.1%} ({entry['difference']:+.1%} without the states)"
    return f"| {entry['name']} | {cells} | {without}{'' if entry['holds'] else ' (OVER)'} |"


# -------------------------------------------------------------------------------------------- published


def check_published(only: Sequence[str], report: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """A dictionary for each pipeline stage whose peak is published."""
    results = []
    for case in published_peaks.CASES:
        for stage, (peak, memory) in enumerate(zip(case.peaks, _published(case), strict=True)):
            estimate = memory.training / 2**30
            difference = estimate / peak - 1
            entry = {
                "model": case.model,
                "layout": case.name,
                "stage": stage,
                "peak": peak,
                "estimate": estimate,
                "difference": difference,
                "holds": abs(difference) <= PUBLISHED_BOUND,
            }
            if _is_chosen(f"{entry['model']} {entry['layout']}", only):
                results.append(entry)
                report(entry)
    return results


def _published(case: published_peaks.Case) -> tuple[StageMemory, ...]:
    tokens = case.sequence_length // case.layout.cp
    options = TrainingOptions(
        impl="transformer_engine",
        precision="bf16",
        on_cpu=False,
        longest=case.sequence_length,
        tokens=tokens,
        num_micro_batches=case.num_micro_batches,
    )
    # Transformer Engine's fused cross entropy keeps the logits in bf16 and overwrites them with their gradient: with
    # the output layer's own, 4 bytes a logit. The loss of `trainer/log_probs.py` is not in these figures.
    return tuple(
        published_peaks.with_fused_loss(memory, tokens, case)
        for memory in trainer_memory(
            case.shape,
            case.layout,
            options,
            StateOptions.of("bf16", {}, {}),
            {"gradient_accumulation_fusion": True},
        )
    )


def published_line(entry: dict[str, Any]) -> str:
    """One row of the table."""
    return (
        f"| {entry['model']} | {entry['layout']} | {entry['stage']} | {entry['peak']:.2f} | {entry['estimate']:.2f} |"
        f" {entry['difference']:+.1%}{'' if entry['holds'] else ' (OVER)'} |"
    )


CHECKS: dict[str, tuple[Callable[..., list[dict[str, Any]]], Callable[[dict[str, Any]], str]]] = {
    "states": (check_states, states_line),
    "activations": (check_activations, activations_line),
    "step": (check_step, step_line),
    "published": (check_published, published_line),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in CHECKS:
        parser.add_argument(f"--{name}", action="store_true", help="do this check alone")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose first columns contain one of these texts")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    chosen = [name for name in CHECKS if getattr(options, name)] or list(CHECKS)
    results: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        check, line = CHECKS[name]
        start = time.perf_counter()
        print(_HEAD[name], flush=True)
        rows = results[name] = check(options.only, lambda entry, line=line: print(line(entry), flush=True))
        failed = sum(not row["holds"] for row in rows)
        print(f"\n{name}: {len(rows)} rows in {time.perf_counter() - start:.0f} s, {failed} out of bounds\n")
    if not any(results.values()):
        parser.error(f"--only {' '.join(options.only)}: no row has that text")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if any(not row["holds"] for rows in results.values() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
