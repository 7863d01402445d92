"""Checksums of what an engine should hold, by the engine's own tensor names.

SGLang keeps query, key and value in one tensor, gate and up in another, the two down projections of latent attention in
a third, all experts of a layer in two, pads the vocabulary to a multiple of 64 (and on a CPU each rank's part of an MLP
to one of `CPU_MULTIPLE`), and splits over its tensor parallel ranks. What it computes from the weights when they are
loaded (the two halves of latent attention's `kv_b_proj`) is not a tensor of the model: only log-probs
check it. The hashes are those that its `/weights_checker` reports: `hash_tensor` of tensors in host
memory, `hash_words` of those on a GPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

import torch
from torch.nn.functional import pad

from fusionrl.models.shape import ModelShape

CPU_MULTIPLE = 32
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
    tensors: Iterable[tuple[str, torch.Tensor]],
    shape: ModelShape,
    tp_size: int,
    hash_of: Callable[[torch.Tensor], str] | None = None,
    mlp_multiple: int = 1,
) -> list[dict[str, str]]:
    """For each engine rank: engine tensor name → hash (`hash_tensor` if no other is given). `tensors` are (Hugging Face
    name, full tensor). The width of each rank's part of an MLP is a multiple of `mlp_multiple`."""
    hash_of = hash_of or hash_tensor
    fused_of = _fused(shape)
    experts: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    ranks: list[dict[str, str]] = [{} for _ in range(tp_size)]
    waiting: dict[str, dict[int, torch.Tensor]] = {}
    for name, full in tensors:
        tensor = _padded_mlp(name, full, mlp_multiple * tp_size)
        if (expert := _EXPERT.fullmatch(name)) is not None:
            parts_of_layer = experts.setdefault(expert["prefix"], {})
            parts_of_layer[int(expert["expert"]), _EXPERT_PARTS[expert["name"]]] = tensor.clone()
            assert shape.moe is not None
            if len(parts_of_layer) == 3 * shape.moe.num_experts:
                for rank in range(tp_size):
                    held = _experts(expert["prefix"], parts_of_layer, shape, rank, tp_size)
                    ranks[rank] |= {held_name: hash_of(both) for held_name, both in held.items()}
                del experts[expert["prefix"]]
            continue
        match = _MODULE.fullmatch(name)
        if match is None or match["name"] not in fused_of:
            for rank in range(tp_size):
                ranks[rank][name] = hash_of(_shard(name, tensor, shape, rank, tp_size))
            continue
        fused, part = fused_of[match["name"]]
        parts = waiting.setdefault(f"{match['prefix']}.{fused}.{match['kind']}", {})
        parts[part] = tensor
        if len(parts) == _NUM_PARTS[fused]:
            full_name = f"{match['prefix']}.{fused}.{match['kind']}"
            del waiting[full_name]
            for rank in range(tp_size):
                pieces = [_rows(parts[i], shape, fused, i, rank, tp_size) for i in range(_NUM_PARTS[fused])]
                ranks[rank][full_name] = hash_of(torch.cat(pieces))
    assert not experts, f"incomplete experts: {sorted(experts)}"
    assert not waiting, f"incomplete fused tensors: {sorted(waiting)}"
    return ranks


def _padded_mlp(name: str, tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """A weight of an MLP with zeros up to the next width that is a multiple; others as they are."""
    if name.endswith(("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight")):
        return pad(tensor, (0, 0, 0, -tensor.size(0) % multiple))
    if name.endswith(("down_proj.weight", "w2.weight")):
        return pad(tensor, (0, -tensor.size(1) % multiple))
    if name.endswith("gate_up_proj.weight"):
        return torch.cat([pad(half, (0, 0, 0, -half.size(0) % multiple)) for half in tensor.chunk(2)])
    return tensor


def _fused(shape: ModelShape) -> dict[str, tuple[str, int]]:
    """Projection → the engine's tensor that it is a part of, and which."""
    if shape.mla is None:
        return _FUSED
    if shape.mla.q_lora_rank is None:  # queries are not compressed, and the one down projection stands alone
        return {name: fused for name, fused in _FUSED_LATENT.items() if fused[0] == "gate_up_proj"}
    return _FUSED_LATENT


def _experts(
    prefix: str, parts: dict[tuple[int, int], torch.Tensor], shape: ModelShape, rank: int, tp_size: int
) -> dict[str, torch.Tensor]:
    """The two tensors that hold all experts of one layer: gates over ups, and downs."""
    assert shape.moe is not None
    numbers = range(shape.moe.num_experts)
    first = [torch.cat([parts[number, part].chunk(tp_size)[rank] for part in (0, 1)]) for number in numbers]
    second = [parts[number, 2].chunk(tp_size, dim=1)[rank] for number in numbers]
    return {
        f"{prefix}.w13_weight": torch.stack(first),
        f"{prefix}.w2_weight": torch.stack(second),
    }


def hash_tensor(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits over the tensor's bytes: the first half of them of its SHA-256."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


_WORD = 0xFFFFFFFF
_TILE = 8192  # words that are hashed to one number
_SEED = 0x243F6A88
# Of each half of a tile's hash: factor of a word's place, what is added to it, and how far the place is rotated.
_LANES = ((0x27D4EB2D, _SEED, 15), (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _WORD, 13))


def hash_words(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits over the tensor's bytes as SGLang's `gpu_tensor_hash` (0.5.23) gives them, on any device.

    Each 32-bit word is mixed with its place (Murmur3's finaliser), the words of a tile are added up and mixed with the
    tensor's size, and the sum over the tiles is mixed again (SplitMix64's finaliser).
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data = pad(data, (0, -data.numel() % 4)).view(torch.int32)
    if not data.numel():
        return f"{0:016x}"
    total = 0
    for start in range(0, data.numel(), 128 * _TILE):  # a few tiles at a time, as the words become wider
        words = data[start : start + 128 * _TILE].long() & _WORD
        places = torch.arange(start, start + words.numel(), device=words.device) & _WORD
        halves = []
        for factor, added, turn in _LANES:
            rotated = places << turn | places >> (32 - turn)
            mixed = _mix(words ^ ((places * factor + added ^ rotated) & _WORD))
            tiles = pad(mixed, (0, -mixed.numel() % _TILE)).view(-1, _TILE).sum(1) & _WORD
            halves.append(_mix(tiles ^ (4 * data.numel() & _WORD)).tolist())
        total += sum(high << 32 | low for high, low in zip(*halves, strict=True))
    total &= 2**64 - 1
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    total = (total ^ total >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return f"{total ^ total >> 31:016x}"


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ words >> 16) * 0x85EBCA6B & _WORD
    words = (words ^ words >> 13) * 0xC2B2AE35 & _WORD
    return words ^ words >> 16


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
        return pad(tensor, (0, 0, 0, -tensor.size(0) % _VOCABULARY_MULTIPLE)).chunk(tp_size)[rank]
    if name.endswith("gate_up_proj.weight"):  # a checkpoint that has the two in one tensor
        return torch.cat([half.chunk(tp_size)[rank] for half in tensor.chunk(2)])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return tensor.chunk(tp_size, dim=1)[rank]
    if shape.mla is not None and name.endswith(("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")):
        return tensor.chunk(tp_size)[rank]
    return tensor
