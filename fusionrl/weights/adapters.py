"""Adapters in a push: as files of PEFT folders in the engines' precision, or added to the weights, W + scale · B A.

Sums are in fp32 and rounded once. In bf16 a weight keeps eight bits, so that an update far smaller than the weight is
lost: `Merger.sums` has how much of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from fusionrl.engines.engine import Files
from fusionrl.models import convert, families
from fusionrl.models.families import hf_shapes
from fusionrl.models.hf_io import HFReader, PeftReader
from fusionrl.models.peft import CONFIG, WEIGHTS, peft_config, read_peft
from fusionrl.models.rules import Rule, Sizes
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import ADAPTER, AdapterSpec, peft_module, peft_sizes, targeted_names
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.weights.remote_calls import MergeLosses, SendReport, new_send_report, note_sent, wait_all

# Modules that engines have as one: SGLang takes an adapter of all of them.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


def engine_files(tensors: Iterable[tuple[str, Tensor]], spec: AdapterSpec, shape: ModelShape, dtype: str) -> Files:
    """Return the files of an adapter for engines; `tensors` as of `iter_hf_tensors` with `spec`.

    SGLang multiplies by lora_alpha / r, whatever else the config says.
    """
    precision: torch.dtype = getattr(torch, dtype)
    named = {name: tensor.detach().to("cpu", precision).contiguous() for name, tensor in tensors}
    named |= {name: torch.zeros(sizes, dtype=precision) for name, sizes in _missing(spec, shape).items()}
    both = (CONFIG, _config(spec, shape)), (WEIGHTS, save(named))
    return {name: np.frombuffer(data, np.uint8) for name, data in both}


def folder_files(folder: str, spec: AdapterSpec, shape: ModelShape, dtype: str) -> Files:
    """Return the same of a PEFT folder, whose adapter is of `spec`. Raises ValueError as `read_peft`."""
    read = PeftReader(read_peft(folder, shape)).get
    return engine_files(
        ((name, read(name, sizes)) for name, sizes in peft_sizes(shape, spec).items()), spec, shape, dtype
    )


@lru_cache(maxsize=2)
def _config(spec: AdapterSpec, shape: ModelShape) -> bytes:
    plain = spec.model_copy(update={"alpha": spec.scale * spec.rank, "use_rslora": False})
    return json.dumps(peft_config(plain, shape, ""), indent=2).encode()


@lru_cache(maxsize=2)
def _missing(spec: AdapterSpec, shape: ModelShape) -> dict[str, Sizes]:
    """Return the tensors of modules without an adapter that engines have as one with modules that do."""
    adapted, zeros = peft_sizes(shape, spec), dict[str, Sizes]()
    for hf, sizes in hf_shapes(shape).items():
        parent, _, leaf = peft_module(hf).rpartition(".")
        siblings = next((modules for modules in _JOINED if leaf in modules), ())
        a, b = f"{parent}.{leaf}.lora_A.weight", f"{parent}.{leaf}.lora_B.weight"
        if a not in adapted and any(f"{parent}.{sibling}.lora_A.weight" in adapted for sibling in siblings):
            zeros |= {a: (spec.rank, sizes[1]), b: (sizes[0], spec.rank)}
    return zeros


def send_files(
    adapters: Mapping[str, Files], targets: Sequence[EngineTarget], version: int, timeout_s: float
) -> SendReport:
    """Let all engines load the adapters at the same time."""
    import ray

    report, start = new_send_report(), time.time()
    shared = ray.put(adapters) if ray.is_initialized() else adapters  # one copy for all engines of a node
    limit_s = 0.9 * timeout_s  # so that an engine that waits says for which requests
    calls = [
        (f"engine {t.index}: load adapters", t.handle.load_adapters.remote(version, shared, limit_s)) for t in targets
    ]
    wait_all(calls, timeout_s)
    num_bytes = sum(data.nbytes for files in adapters.values() for data in files.values())
    note_sent(report, start, num_bytes=num_bytes, num_calls=len(calls))
    return report


ReadTensor = Callable[[str, Sizes], Tensor]
"""Reads a tensor by its name and sizes."""


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (W + scale · B A, scale · B A) in fp32.

    weight  # [..., in]
    a       # [rank, in]
    b       # [..., rank]
    """
    added = (b.float() @ a.float()).mul_(scale)
    return weight.float() + added, added


def merged_tensors(
    base: HFReader, shape: ModelShape, spec: AdapterSpec, factor: ReadTensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of a model's folder, with adapters added, in the folder's precision.

    `factor` reads a tensor of the adapters. Tensors in fp8 become bf16.
    """
    in_fp8 = base.quantization.names if base.quantization is not None else frozenset()
    targeted, sizes = targeted_names(shape, spec), peft_sizes(shape, spec)
    for name, own in families.hf_shapes(shape).items():
        if name not in base.names and name not in targeted:
            continue  # optional
        weight = base.get(name, own)
        dtype = torch.bfloat16 if name in in_fp8 else weight.dtype
        if name in targeted:
            a, b = (f"{peft_module(name)}.lora_{letter}.weight" for letter in "AB")
            weight, _ = merged(weight, factor(a, sizes[a]), factor(b, sizes[b]), spec.scale)
        yield name, weight.to(dtype)


@dataclass
class MergeSums:
    """Sums over the values that `Merger` merges, on their device: of (what rounding changed)², and of (what
    adapters add)²."""

    lost: Tensor | float = 0.0
    added: Tensor | float = 0.0

    def take(self) -> MergeLosses:
        """Return the sums, and begin anew."""
        sums = float(self.lost), float(self.added)
        self.lost = self.added = 0.0
        return sums


@dataclass(frozen=True)
class Merger:
    """Adds a rank's adapters to its parts of the weights, one tensor at a time.

    adapters  Megatron name → (rule, this rank's part), as `local_adapters` lists them
    dtype     of what engines get
    sums      grow by what rounding loses of each piece
    """

    adapters: Mapping[str, tuple[Rule, Tensor]]
    scale: float
    dtype: torch.dtype
    sums: MergeSums

    def piece(self, rule: Rule, value: Tensor, place: int, size: int) -> Tensor:
        """Return the one of `convert.pieces` at `place`, with its adapter if it has one."""
        piece = convert.pieces(rule, value, size)[place]
        if (factors := self._factors(rule, place, size)) is None:
            return piece
        exact, added = merged(piece, *factors, self.scale)
        rounded = exact.to(self.dtype)
        if self.dtype != torch.float32:
            self.sums.lost += exact.sub_(rounded).square_().sum()
            self.sums.added += added.square_().sum()
        return rounded

    def part(self, rule: Rule, value: Tensor, size: int) -> Tensor:
        """Return this rank's part of a Megatron tensor, one of `size`, as engines get it."""
        if not any(self._factors(rule, place, size) for place in range(len(rule.hf))):
            return value if rule.is_fp32 else value.to(self.dtype)
        pieces = [self.piece(rule, value, place, size) for place in range(len(rule.hf))]
        return convert.join(rule, [piece.reshape(-1, value.size(1)).to(self.dtype) for piece in pieces], size)

    def _factors(self, rule: Rule, place: int, size: int) -> tuple[Tensor, Tensor] | None:
        """Return A and B of tensor `place` of the rule, the rows of B in the order of those of the piece."""
        prefix = rule.megatron.removesuffix(".weight") + ADAPTER
        if (held := self.adapters.get(f"{prefix}B.{place}")) is None:
            return None
        rule_of_b, b = held
        return self.adapters[f"{prefix}A.{place}"][1].detach(), convert.pieces(rule_of_b, b.detach(), size)[0]
