"""Checksums of what an engine should hold, by the engine's own tensor names.

SGLang keeps query, key and value in one tensor, gate and up in another, the two down projections of latent attention in
a third, all experts of a layer in two, pads the vocabulary to a multiple of 64, and splits over its tensor parallel
ranks. What it computes from the weights when they are loaded (the two halves of latent attention's `kv_b_proj`) stands
beside them and is no tensor of the model: that is checked by log-probs alone. The hash is the first eight bytes of the
SHA-256 of a tensor's bytes, which is what its `/weights_checker` reports for tensors in host memory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import torch

from fusionrl.config.model_shape import ModelShape

_VOCABULARY_MULTIPLE = 64
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_FUSED_LATENT = {
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2, "fused_qkv_a_proj_with_mqa": 2}
_MODULE = re.compile(r"(?P<prefix>.*)\.(?P<name>\w+)\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.weight")
# An expert's projections → the engine's tensor of all experts, and the place in it.
_EXPERT_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def engine_checksums(
    tensors: Iterable[tuple[str, torch.Tensor]], shape: ModelShape, tp_size: int
) -> list[dict[str, str]]:
    """For each engine rank: engine tensor name → hash. `tensors` are (Hugging Face name, full tensor)."""
    fused_of = _fused(shape)
    experts: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    ranks: list[dict[str, str]] = [{} for _ in range(tp_size)]
    waiting: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors:
        if (expert := _EXPERT.fullmatch(name)) is not None:
            parts_of_layer = experts.setdefault(expert["prefix"], {})
            parts_of_layer[int(expert["expert"]), _EXPERT_PARTS[expert["name"]]] = tensor.clone()
            assert shape.moe is not None
            if len(parts_of_layer) == 3 * shape.moe.num_experts:
                for rank in range(tp_size):
                    ranks[rank].update(_experts(expert["prefix"], parts_of_layer, shape, rank, tp_size))
                del experts[expert["prefix"]]
            continue
        match = _MODULE.fullmatch(name)
        if match is None or match["name"] not in fused_of:
            for rank in range(tp_size):
                ranks[rank][name] = hash_tensor(_shard(name, tensor, shape, rank, tp_size))
            continue
        fused, part = fused_of[match["name"]]
        parts = waiting.setdefault(f"{match['prefix']}.{fused}.{match['kind']}", {})
        parts[part] = tensor
        if len(parts) == _NUM_PARTS[fused]:
            full_name = f"{match['prefix']}.{fused}.{match['kind']}"
            del waiting[full_name]
            for rank in range(tp_size):
                pieces = [_rows(parts[i], shape, fused, i, rank, tp_size) for i in range(_NUM_PARTS[fused])]
                ranks[rank][full_name] = hash_tensor(torch.cat(pieces))
    assert not experts, f"incomplete experts: {sorted(experts)}"
    assert not waiting, f"incomplete fused tensors: {sorted(waiting)}"
    return ranks


def _fused(shape: ModelShape) -> dict[str, tuple[str, int]]:
    """Projection → the engine's tensor that it is a part of, and which."""
    if shape.mla is None:
        return _FUSED
    if shape.mla.q_lora_rank is None:  # queries are not compressed, and the one down projection stands alone
        return {name: fused for name, fused in _FUSED_LATENT.items() if fused[0] == "gate_up_proj"}
    return _FUSED_LATENT


def _experts(
    prefix: str, parts: dict[tuple[int, int], torch.Tensor], shape: ModelShape, rank: int, tp_size: int
) -> dict[str, str]:
    """Hashes of the two tensors that hold all experts of one layer: gates over ups, and downs."""
    assert shape.moe is not None
    numbers = range(shape.moe.num_experts)
    first = [torch.cat([parts[number, part].chunk(tp_size)[rank] for part in (0, 1)]) for number in numbers]
    second = [parts[number, 2].chunk(tp_size, dim=1)[rank] for number in numbers]
    return {
        f"{prefix}.w13_weight": hash_tensor(torch.stack(first)),
        f"{prefix}.w2_weight": hash_tensor(torch.stack(second)),
    }


def hash_tensor(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits over the tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


def _rows(tensor: torch.Tensor, shape: ModelShape, fused: str, part: int, rank: int, tp_size: int) -> torch.Tensor:
    """This rank's rows of one part; key and value heads are repeated where there are fewer than ranks."""
    if fused == "qkv_proj" and part > 0 and shape.num_query_groups < tp_size:
        group = rank * shape.num_query_groups // tp_size
        return tensor[group * shape.head_dim : (group + 1) * shape.head_dim]
    if fused == "fused_qkv_a_proj_with_mqa":
        return tensor
    return tensor.chunk(tp_size)[rank]


def _shard(name: str, tensor: torch.Tensor, shape: ModelShape, rank: int, tp_size: int) -> torch.Tensor:
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        missing = -tensor.shape[0] % _VOCABULARY_MULTIPLE
        if missing:
            tensor = torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])])
        return tensor.chunk(tp_size)[rank]
    if name.endswith("gate_up_proj.weight"):  # a checkpoint that has the two in one tensor
        return torch.cat([half.chunk(tp_size)[rank] for half in tensor.chunk(2)])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return tensor.chunk(tp_size, dim=1)[rank]
    if shape.mla is not None and name.endswith(("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")):
        return tensor.chunk(tp_size)[rank]
    return tensor
