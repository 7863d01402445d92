"""Peaks of Megatron-LM's training memory on GPUs, as others have published them.

Source: SimuMax (github.com/MooreThreads/SimuMax, commit 4dcaae5), docs/b200/b200_release_v1.2_summary.json, the fields
peak_memory_by_rank_mb (torch's max_memory_allocated): NVIDIA B200, 8 GPUs, bf16, Transformer Engine 2.11, distributed
optimizer, gradients in fp32, sequence parallelism, fused accumulation of gradients, fused cross entropy, no recompute,
micro-batches of one sequence; experts padded to an even share. Of rows that differ only in the number of micro-batches
the first is kept: their peaks are the same. Figures are facts that were measured there; nothing here was run.
"""

from dataclasses import dataclass, replace
from typing import Any

from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.memory.trainer import StageMemory

_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": False}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
_MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 70B, 12 layers": _LLAMA
    | {
        "num_hidden_layers": 12,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Llama 3 405B, 4 layers": _LLAMA
    | {
        "num_hidden_layers": 4,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 16,
    },
    "DeepSeek-V2, 4 layers": _DEEPSEEK
    | {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "vocab_size": 102400,
    },
    "DeepSeek-V3, 4 layers": _DEEPSEEK
    | {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "vocab_size": 129280,
    },
}


@dataclass(frozen=True)
class Case:
    """One published layout: GiB of a rank of each pipeline stage."""

    model: str
    peaks: tuple[float, ...]
    sizes: tuple[tuple[str, int], ...]
    sequence_length: int = 4096
    num_micro_batches: int = 4

    @property
    def layout(self) -> TrainerLayout:
        return TrainerLayout(8, **dict(self.sizes))

    @property
    def shape(self) -> ModelShape:
        return shape_from_hf_config(_MODELS[self.model])

    @property
    def name(self) -> str:
        parts = [f"{axis.upper()} {size}" for axis, size in self.sizes] or ["DP 8"]
        return " ".join(parts) + (f", {self.sequence_length} tokens" if self.sequence_length != 4096 else "")


def _case(model: str, peaks: tuple[float, ...], sequence_length: int = 4096, **sizes: int) -> Case:
    (name,) = (name for name in _MODELS if model in name)
    return Case(name, peaks, tuple(sizes.items()), sequence_length)


CASES = (
    _case("70B", (66.55, 62.97), pp=2),
    _case("70B", (60.68,), tp=2),
    _case("70B", (39.07,), tp=4),
    _case("70B", (28.29,), tp=8),
    _case("405B", (86.61, 87.08), pp=2),
    _case("405B", (81.59,), tp=2),
    _case("405B", (52.89,), tp=4),
    _case("405B", (38.57,), tp=8),
    _case("70B", (68.43,), 32768, tp=2, cp=4),
    _case("70B", (104.51,), 32768, cp=8),
    _case("405B", (87.03,), 32768, tp=2, cp=4),
    _case("405B", (139.22,), 32768, cp=8),
    _case("70B", (112.67,), 131072, tp=2, cp=4),
    _case("70B", (147.99,), 131072, cp=8),
    _case("405B", (118.13,), 131072, tp=2, cp=4),
    _case("V2", (45.63,), ep=8),
    _case("V2", (31.58, 44.70), ep=4, pp=2),
    _case("V3", (104.30,), ep=8),
    _case("V3", (71.24, 114.00), ep=4, pp=2),
)


def with_fused_loss(memory: StageMemory, tokens: int, case: Case) -> StageMemory:
    """The stage with the loss of these runs in place of this project's: its logits in bf16 and their gradient.

    Whichever is larger counts, that or the widest gradients of a layer (6 bytes a value of the MLP and token).
    """
    layout, shape = case.layout, case.shape
    is_last = memory.stage == layout.pp - 1
    head = 4 * tokens * shape.vocab_size / layout.tp if is_last else 0.0
    layer = 6 * tokens * shape.ffn_hidden_size / layout.tp
    return replace(
        memory, activations=memory.activations - memory.head, transient=max(head, layer) + memory.placeholders
    )
