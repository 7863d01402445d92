"""Checksums of what an engine should hold, by the engine's own tensor names.

SGLang keeps query, key and value in one tensor, gate and up in another, the two down projections of latent attention in
a third, all experts of a layer in two, pads the vocabulary to a multiple of 64 (and on a CPU each rank's part of an MLP
to one of `CPU_MULTIPLE`), and splits over its tensor parallel ranks. What it computes from the weights when they are
loaded (the two halves of latent attention's `kv_b_proj`) only log-probs check. The hashes are those that its
`/weights_checker` reports: `hash_tensor` of tensors in host memory, `hash_words` of those on a GPU.
"""

import hashlib
import re
from collections.abc import Callable, Iterable

import torch
from torch.nn.functional import pad

from fusionrl.models.shape import ModelShape

CPU_MULTIPLE = 32
_VOCABULARY_MULTIPLE = 64
# Projection → the engine's tensor that it is a part of, which part, and of how many.
_FUSED = {
    **{name: ("qkv_proj", i, 3) for i, name in enumerate(("q_proj", "k_proj", "v_proj"))},
    **{name: ("gate_up_proj", i, 2) for i, name in enumerate(("gate_proj", "up_proj"))},
    **{name: ("fused_qkv_a_proj_with_mqa", i, 2) for i, name in enumerate(("q_a_proj", "kv_a_proj_with_mqa"))},
}
_MODULE = re.compile(r"(?P<prefix>.*)\.(?P<name>\w+)\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}  # of the engine's w13; the others are in w2
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj")
_COLUMNS = ("o_proj", "down_proj", "w2")


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
    ranks: list[dict[str, str]] = [{} for _ in range(tp_size)]
    waiting: dict[str, dict[tuple[int, int], tuple[str, torch.Tensor]]] = {}
    for name, full in tensors:
        target, place, num_parts = _place(name, shape)
        is_expert = _EXPERT.fullmatch(name) is not None
        tensor = _padded_mlp(name, full, mlp_multiple * tp_size)
        parts = waiting.setdefault(target, {})
        parts[place] = name, tensor.clone() if is_expert else tensor
        if len(parts) < num_parts:
            continue
        del waiting[target]
        experts: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for key in sorted(parts):
            experts.setdefault(key[0], []).append(parts[key])
        for rank in range(tp_size):
            held = [
                torch.cat([_shard(*part, shape, rank, tp_size) for part in of_expert]) for of_expert in experts.values()
            ]
            ranks[rank][target] = hash_of(torch.stack(held) if is_expert else held[0])
    assert not waiting, f"incomplete fused tensors: {sorted(waiting)}"
    return ranks


def _place(name: str, shape: ModelShape) -> tuple[str, tuple[int, int], int]:
    """(the engine's tensor that a Hugging Face tensor is a part of, its expert and which part, number of parts)."""
    if (match := _EXPERT.fullmatch(name)) is not None:
        assert shape.moe is not None
        expert, part = int(match["expert"]), _EXPERT_PARTS.get(match["name"])
        if part is None:
            return f"{match['prefix']}.w2_weight", (expert, 0), shape.moe.num_experts
        return f"{match['prefix']}.w13_weight", (expert, part), 2 * shape.moe.num_experts
    match = _MODULE.fullmatch(name)
    # With latent attention queries stand alone; where they are not compressed, so does the one down projection.
    alone = () if shape.mla is None else ("q_proj", "" if shape.mla.q_lora_rank else "kv_a_proj_with_mqa")
    if match is None or match["name"] not in _FUSED or match["name"] in alone:
        return name, (0, 0), 1
    fused, part, num_parts = _FUSED[match["name"]]
    return f"{match['prefix']}.{fused}.{match['kind']}", (0, part), num_parts


def _padded_mlp(name: str, tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """A weight of an MLP with zeros up to the next width that is a multiple; others as they are."""
    if name.endswith(("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight")):
        return pad(tensor, (0, 0, 0, -tensor.size(0) % multiple))
    if name.endswith(("down_proj.weight", "w2.weight")):
        return pad(tensor, (0, -tensor.size(1) % multiple))
    if name.endswith("gate_up_proj.weight"):
        return torch.cat([pad(half, (0, 0, 0, -half.size(0) % multiple)) for half in tensor.chunk(2)])
    return tensor


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


def _shard(name: str, tensor: torch.Tensor, shape: ModelShape, rank: int, tp_size: int) -> torch.Tensor:
    """Cut out an engine rank's part of a Hugging Face tensor; key and value heads are repeated if fewer than ranks."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return pad(tensor, (0, 0, 0, -tensor.size(0) % _VOCABULARY_MULTIPLE)).chunk(tp_size)[rank]
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module in ("k_proj", "v_proj") and shape.num_query_groups < tp_size:
        group = rank * shape.num_query_groups // tp_size
        return tensor[group * shape.head_dim : (group + 1) * shape.head_dim]
    if module == "gate_up_proj":  # a checkpoint that has the two in one tensor
        return torch.cat([half.chunk(tp_size)[rank] for half in tensor.chunk(2)])
    if module in _COLUMNS and tensor.dim() > 1:  # each rank has the whole bias
        return tensor.chunk(tp_size, dim=1)[rank]
    return tensor.chunk(tp_size)[rank] if module in _ROWS else tensor
