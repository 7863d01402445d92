"""Checksums of what an engine should hold, by the engine's own tensor names.

SGLang keeps some tensors in one (each kind of layer says which: `engine_tensors`) and all experts of a layer in two,
pads the vocabulary to a multiple of 64 (and on a CPU each rank's part of an MLP to one of `CPU_MULTIPLE`, which of a
vision tower may be padded anyway), and splits over its tensor parallel ranks. What it computes from the weights when
they are loaded (the two halves of latent attention's `kv_b_proj`) only log-probs check. The hashes are those that its
`/weights_checker` reports: `hash_tensor` of tensors in host memory, `hash_words` of those on a GPU.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.functional import pad

from fusionrl.models import families
from fusionrl.models.hf_folder import whole_name
from fusionrl.models.shape import ModelShape
from fusionrl.models.vision import NAMES as TOWER
from fusionrl.models.vision import VisionShape

CPU_MULTIPLE = 32
_VOCABULARY_MULTIPLE = 64
_MODULE = re.compile(r"(?P<prefix>.*\.layers\.(?P<layer>\d+)\..*)\.(?P<name>\w+)\.(?P<kind>weight|bias)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.weight")
# A stack of gpt-oss, [experts, in, rows] with rows of gate and of up that alternate, and its bias [experts, rows].
_STACK = re.compile(r"(?P<prefix>.*\.experts)\.(?P<name>gate_up_proj|down_proj)(?P<bias>_bias)?")
_EXPERT_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}  # of the engine's w13; the others are in w2
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj")
_COLUMNS = ("o_proj", "down_proj", "w2")


def engine_checksums(
    tensors: Iterable[tuple[str, torch.Tensor]],
    shape: ModelShape,
    tp_size: int,
    hash_of: Callable[[torch.Tensor], str] | None = None,
    mlp_multiple: int = 1,
    whole_tower: bool = False,
) -> list[dict[str, str]]:
    """For each engine rank: engine tensor name → hash (`hash_tensor` if no other is given). `tensors` are (Hugging Face
    name, full tensor). The width of each rank's part of an MLP is a multiple of `mlp_multiple`. `whole_tower`: each
    rank has all of a vision tower (SGLang's --mm-enable-dp-encoder)."""
    hash_of = hash_of or hash_tensor
    ranks: list[dict[str, str]] = [{} for _ in range(tp_size)]
    waiting: dict[str, dict[tuple[int, int], tuple[str, torch.Tensor]]] = {}
    family = families.get_family(shape.model_type)
    for name, full in _with_derived(tensors, shape):
        if family.engine_fp32 and name.endswith(family.engine_fp32):
            full = full.float()
        if (match := _STACK.fullmatch(name)) is not None:
            joined = "w13_weight" if match["name"] == "gate_up_proj" else "w2_weight"
            for rank, held in enumerate(_stack_shards(match["name"], full, tp_size, mlp_multiple)):
                ranks[rank][f"{match['prefix']}.{joined}{match['bias'] or ''}"] = hash_of(held)
            continue
        target, place, num_parts = _place(name, shape)
        is_expert = _EXPERT.fullmatch(name) is not None
        multiple = mlp_multiple * tp_size
        if shape.vision is not None and _is_tower(name):
            own = shape.vision.engine_multiple
            multiple = own if mlp_multiple == 1 else math.lcm(own, multiple)
        elif mlp_multiple > 1 and ".shared_experts." in name:  # one MLP of several, each of which is padded
            rows = full.size(int(name.endswith("down_proj.weight")))
            multiple *= rows // max(kind.expert_rows for kind in shape.mlp)
        tensor = _padded(name, full, multiple)
        parts = waiting.setdefault(target, {})
        parts[place] = name, tensor.clone() if is_expert else tensor
        if len(parts) < num_parts:
            continue
        del waiting[target]
        experts: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for key in sorted(parts):
            experts.setdefault(key[0], []).append(parts[key])
        for path in family.engine_paths:
            target = target.replace(path, ".")
        if shape.vision is not None and family.published is not None and family.published.is_nested:
            target = whole_name(target, family.published)
        for rank in range(tp_size):
            part_of = (0, 1) if whole_tower and _is_tower(name) else (rank, tp_size)
            held = [torch.cat([_shard(*part, shape, *part_of) for part in of_expert]) for of_expert in experts.values()]
            ranks[rank][target] = hash_of(torch.stack(held) if is_expert else held[0])
    assert not waiting, f"incomplete fused tensors: {sorted(waiting)}"
    return ranks


def _stack_shards(name: str, stack: torch.Tensor, tp_size: int, mlp_multiple: int) -> list[torch.Tensor]:
    """Divide a stack over an engine's ranks: rows of gate and up, columns of down; the first has down's bias."""
    tensor = stack.transpose(1, 2) if stack.dim() == 3 else stack
    if name == "gate_up_proj":
        rows = -tensor.size(1) % (2 * mlp_multiple * tp_size)
        return list(pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, rows)).chunk(tp_size, 1))
    if tensor.dim() == 2:
        return [tensor, *[torch.zeros_like(tensor)] * (tp_size - 1)]
    return list(pad(tensor, (0, -tensor.size(2) % (mlp_multiple * tp_size))).chunk(tp_size, 2))


def _with_derived(tensors: Iterable[tuple[str, torch.Tensor]], shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensors`, and what an engine keeps in addition to the weight of a norm that multiplies by 1 + weight."""
    has_copies = shape.zero_centered_norms and families.get_family(shape.model_type).engine_copies
    for name, tensor in tensors:
        yield name, tensor
        is_other = name.endswith("linear_attn.norm.weight") or _is_tower(name)
        if has_copies and name.endswith("norm.weight") and not is_other:
            yield f"{name.removesuffix('weight')}gemma_weight", tensor + 1


def _place(name: str, shape: ModelShape) -> tuple[str, tuple[int, int], int]:
    """(the engine's tensor that a Hugging Face tensor is a part of, its expert and which part, number of parts)."""
    if (match := _EXPERT.fullmatch(name)) is not None:
        expert, part = int(match["expert"]), _EXPERT_PARTS.get(match["name"])
        if part is None:
            return f"{match['prefix']}.w2_weight", (expert, 0), shape.num_experts
        return f"{match['prefix']}.w13_weight", (expert, part), 2 * shape.num_experts
    if shape.vision is not None and _is_tower(name):
        head, _, ending = name.rpartition(".")
        for joined, modules in shape.vision.engine_joined.items():
            if module := next((module for module in modules if head.endswith(module)), None):
                return f"{head.removesuffix(module)}{joined}.{ending}", (0, modules.index(module)), len(modules)
        for module, joined in shape.vision.engine_modules.items():
            name = name.replace(module, joined)
        return name, (0, 0), 1
    if (match := _MODULE.fullmatch(name)) is not None and families.get_family(shape.model_type).engines_join:
        layer = int(match["layer"])
        for kind in (shape.attention[layer], shape.mlp[layer]):
            for joined, modules in kind.engine_tensors().items():
                if match["name"] in modules:
                    target = f"{match['prefix']}.{joined}.{match['kind']}"
                    return target, (0, modules.index(match["name"])), len(modules)
    return name, (0, 0), 1


def _padded(name: str, tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """A weight or bias of an MLP with zeros up to the next width that is a multiple; others as they are."""
    module, _, kind = name.rpartition(".")
    if module.endswith(("gate_proj", "up_proj", "w1", "w3", "mlp.linear_fc1")) and not module.endswith("gate_up_proj"):
        return pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, -tensor.size(0) % multiple))
    if module.endswith(("down_proj", "w2", "mlp.linear_fc2")) and kind == "weight":
        return pad(tensor, (0, -tensor.size(1) % multiple))
    if module.endswith("gate_up_proj"):
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


def _is_tower(name: str) -> bool:
    return name.startswith(TOWER)


def _tower_shard(name: str, tensor: torch.Tensor, vision: VisionShape, rank: int, tp_size: int) -> torch.Tensor:
    """Cut out an engine rank's part of a vision tower's tensor."""
    module, _, kind = name.rpartition(".")
    if module.endswith(("attn.qkv", "wqkv")):
        return torch.cat([part.chunk(tp_size)[rank] for part in tensor.chunk(3)])
    if module.endswith(vision.engine_columns) and kind == "weight":
        return tensor.chunk(tp_size, dim=1)[rank]
    return tensor.chunk(tp_size)[rank] if module.endswith(vision.engine_rows) else tensor


def _module(name: str) -> str:
    """The module that a tensor belongs to; a tensor that is neither weight nor bias has a name of its own."""
    head, _, last = name.rpartition(".")
    return head.rpartition(".")[2] if last in ("weight", "bias") else last


def _shard(name: str, tensor: torch.Tensor, shape: ModelShape, rank: int, tp_size: int) -> torch.Tensor:
    """Cut out an engine rank's part of a Hugging Face tensor; key and value heads are repeated if fewer than ranks."""
    if _module(name) in families.get_family(shape.model_type).engine_whole:
        return tensor
    if shape.vision is not None and _is_tower(name) and not name.endswith("pos_embed.weight"):
        return _tower_shard(name, tensor, shape.vision, rank, tp_size)
    if name.endswith(("embed_tokens.weight", "lm_head.weight", "pos_embed.weight")):
        return pad(tensor, (0, 0, 0, -tensor.size(0) % _VOCABULARY_MULTIPLE)).chunk(tp_size)[rank]
    module = _module(name)
    if (match := _LAYER.search(name)) is not None:
        kind = shape.attention[int(match[1])]
        if (sections := kind.engine_rows(shape).get(module)) is not None:
            return torch.cat([part.chunk(tp_size)[rank] for part in tensor.split(list(sections))])
        if module in kind.engine_columns():
            return tensor.chunk(tp_size, dim=1)[rank]
    rows = (*_ROWS, *families.get_family(shape.model_type).engine_rows)
    if module in ("k_proj", "v_proj", "k_norm") and module in rows and shape.num_query_groups < tp_size:
        group = rank * shape.num_query_groups // tp_size
        return tensor[group * shape.head_dim : (group + 1) * shape.head_dim]
    if module == "qkv_proj":  # a checkpoint that has the three in one tensor
        sizes = [shape.head_dim * count for count in (shape.num_attention_heads, *[shape.num_query_groups] * 2)]
        parts = zip(("q_proj", "k_proj", "v_proj"), tensor.split(sizes), strict=True)
        return torch.cat([_shard(f".{part}.weight", values, shape, rank, tp_size) for part, values in parts])
    if module == "gate_up_proj":  # a checkpoint that has the two in one tensor
        return torch.cat([half.chunk(tp_size)[rank] for half in tensor.chunk(2)])
    if module in _COLUMNS and tensor.dim() > 1:  # each rank has the whole bias
        return tensor.chunk(tp_size, dim=1)[rank]
    return tensor.chunk(tp_size)[rank] if module in rows else tensor
