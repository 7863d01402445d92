"""Low-rank adapters for Megatron's linear layers, one for each Hugging Face tensor that a layer's weight joins.

A layer gets a child `adapter`, whose output a forward hook adds to the layer's. Of a layer whose rows are divided over
tensor-parallel ranks, each rank has A whole and its rows of B; of one whose columns are, its columns of A and B whole.
So [tokens, rank] crosses ranks, not [tokens, hidden]. Weights keep their values and want no gradients (`model.freeze`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from fusionrl.models import convert
from fusionrl.models.hf_io import fill_adapters, load_peft, local_tensors
from fusionrl.models.rules import Rule
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import ADAPTER, AdapterSpec, adapter_rules


class Matrices(torch.nn.Module):
    """A or B of a layer, by the place of the Hugging Face tensor in the weight's rule.

    Excluded from `state_dict()`: checkpoints of weights have no adapters, and the rules make those of adapters.
    """

    def forward(self) -> dict[str, Tensor]:
        """Return them. Called as a module, as Megatron then waits until they are gathered (--overlap-param-gather)."""
        return dict(self.named_parameters())

    def _save_to_state_dict(self, *unused: object) -> None: ...

    def _load_from_state_dict(self, *unused: object) -> None: ...


class Adapter(torch.nn.Module):
    """The adapters of one weight: what B A x adds to the layer's output.

    rule        of the weight
    A, B        this rank's parts of the matrices [rank, in] and [out, rank]
    is_enabled  False: the layer computes as without it
    """

    def __init__(self, rule: Rule, spec: AdapterSpec, rules: Mapping[str, Rule], config: TransformerConfig) -> None:
        super().__init__()
        self.rule, self.spec, self.is_enabled = rule, spec, True
        is_expert = rule.expert is not None
        self.group = (
            parallel_state.get_expert_tensor_parallel_group()
            if is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        self.size = self.group.size()
        self.by_rows, self.by_columns = rule.split in ("rows", "paired_rows"), rule.split == "columns"
        self.has_sequence_part = bool(config.sequence_parallel) and not is_expert
        self.A, self.B = Matrices(), Matrices()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        prefix = rule.megatron.removesuffix(".weight") + ADAPTER
        for place in range(len(rule.hf)):
            for kind, matrices in (("A", self.A), ("B", self.B)):
                of_matrix = rules.get(f"{prefix}{kind}.{place}")
                if of_matrix is not None:
                    sizes = convert.split(of_matrix, torch.empty(of_matrix.sizes, device="meta"), 0, self.size).shape
                    matrix = torch.nn.Parameter(torch.empty(sizes, dtype=config.params_dtype, device=device))
                    self._mark(matrix, of_matrix)
                    matrices.register_parameter(str(place), matrix)

    def _mark(self, matrix: torch.nn.Parameter, rule: Rule) -> None:
        """Tell Megatron which ranks have parts of it, or the same values: by that it sums gradients and their norm."""
        is_divided = rule.split != "replicated" and self.size > 1
        if self.rule.expert is not None:
            # Megatron leaves out of the norm what is whole where its tensor-parallel rank is not 0; an expert's ranks
            # may be others.
            matrix.allreduce, matrix.shared = False, not is_divided and self.group.rank() > 0
            is_divided = True
        elif not is_divided:
            matrix.sequence_parallel = self.has_sequence_part
        set_tensor_model_parallel_attributes(matrix, is_divided, 1 if rule.split == "columns" else 0, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return scale · B A x [..., out] for the layer's input x [..., in]."""
        a, b = self.summed(*self.factors())
        return F.linear(self._crossed(F.linear(self.dropped(hidden), a) * self.spec.scale), b)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [matrices * rank, in] and B [out, matrices * rank] of the joined weight.

        A row of B has values in the columns of its own matrix alone.
        """
        rank, of_a, of_b = self.spec.rank, list(self.A().values()), self.B()
        a, width = torch.cat(of_a) if len(of_a) > 1 else of_a[0], len(of_a) * rank
        if len(self.rule.hf) == 1:
            return a, of_b["0"]
        parts, column = [], 0
        for place, (rows, _) in enumerate(self.rule.hf.values()):
            if (b := of_b.get(str(place))) is None:
                parts.append(a.new_zeros(rows // self.size if self.by_rows else rows, width))
            else:
                parts.append(F.pad(b, (column, width - rank - column)))
                column += rank
        if self.rule.join != "grouped":
            return a, torch.cat(parts)
        groups = self.rule.groups // (self.size if self.by_rows else 1)
        return a, torch.cat([part.view(groups, -1, width) for part in parts], 1).flatten(0, 1)

    def summed(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B of experts so that gradients of what all expert-tensor-parallel ranks have are summed.

        The ranks' outputs are summed later, too.
        """
        if self.size > 1 and self.rule.expert is not None:
            a = copy_to_tensor_model_parallel_region(a, group=self.group) if self.by_rows else a
            b = copy_to_tensor_model_parallel_region(b, group=self.group) if self.by_columns else b
        return a, b

    def _crossed(self, low: Tensor) -> Tensor:
        """Return A x [..., matrices * rank] as B needs it, from what each tensor-parallel rank has of it."""
        if self.size == 1 or self.rule.expert is not None or not (self.by_rows or self.by_columns):
            return low
        if self.has_sequence_part:
            cross = gather_from_sequence_parallel_region if self.by_rows else reduce_scatter_to_sequence_parallel_region
        else:
            cross = copy_to_tensor_model_parallel_region if self.by_rows else reduce_from_tensor_model_parallel_region
        return cross(low, group=self.group)

    def dropped(self, hidden: Tensor) -> Tensor:
        """Return the input with values dropped: others on each rank, unless the ranks have the same input."""
        if not (self.training and self.spec.dropout):
            return hidden
        randomness: AbstractContextManager[object] = nullcontext()
        if self.rule.expert is not None:
            randomness = get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        elif self.by_columns or self.has_sequence_part:
            randomness = get_cuda_rng_tracker().fork()
        with randomness:
            if self.size == 1 or self.rule.expert is None or self.by_columns:
                return F.dropout(hidden, self.spec.dropout)
            mask = F.dropout(torch.ones_like(hidden), self.spec.dropout)
        # The ranks of an expert have the same input, but random generators of their own.
        dist.broadcast(mask, dist.get_global_rank(self.group, 0), group=self.group)
        return hidden * mask


class GroupedAdapter(torch.nn.ModuleList):
    """The adapters of a layer that computes all experts of a rank at once, whose tokens follow one another."""

    def forward(self, hidden: Tensor, splits: Sequence[int] | Tensor) -> Tensor:
        """Return scale · B A x [tokens, out] for x [tokens, in], of which expert i has `splits[i]` rows."""
        experts: list[Adapter] = list(self)
        first, ends = experts[0], torch.as_tensor(splits).cumsum(0).to(hidden.device, torch.int32)
        a, b = map(torch.stack, zip(*(expert.factors() for expert in experts), strict=True))
        a, b = first.summed(a, b)
        return _grouped(_grouped(first.dropped(hidden), a.mT, ends) * first.spec.scale, b.mT, ends)


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [tokens, in] by the matrix [experts, in, out] of their expert; its rows end at `ends` [experts]."""
    is_aligned = all(size * rows.itemsize % 16 == 0 for size in matrices.shape[1:])
    if is_aligned and (rows.dtype is torch.bfloat16 or not rows.is_cuda):  # kernels of a GPU take nothing else
        return F.grouped_mm(rows, matrices, offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(counts), matrices, strict=True)])


def attach(
    modules: Sequence[torch.nn.Module],
    transformer: TransformerConfig,
    shape: ModelShape,
    spec: AdapterSpec,
    seed: int,
    folder: str | None = None,
) -> None:
    """Give adapters to a model's layers before it is wrapped for data parallelism.

    Their values are those in `folder`, of PEFT's, or initial ones by the seed. Raises ValueError as `load_peft`.
    """
    rules = adapter_rules(shape, spec)
    layers = (layer for chunk in modules for layer in chunk.modules())
    owners = {weight: layer for layer in layers for weight in layer.parameters(recurse=False)}
    targeted: dict[torch.nn.Module, list[Rule]] = {}
    for _, rule, weight in local_tensors(modules, shape):
        if spec.targeted(rule):
            targeted.setdefault(owners[weight], []).append(rule)
    for layer, weights in targeted.items():
        of_layer = [Adapter(rule, spec, rules, transformer) for rule in weights]
        is_grouped = hasattr(layer, "num_gemms")  # Transformer Engine's, also with one expert
        layer.adapter = GroupedAdapter(of_layer) if is_grouped else of_layer[0]
        if hasattr(layer, "return_layernorm_output"):  # Transformer Engine's with a norm, whose output is A's input
            layer.return_layernorm_output = True
        layer.register_forward_hook(_add)
    if folder is None:
        initialize(modules, shape, spec, seed)
    else:
        load_peft(folder, modules, shape, spec)


def _add(layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: object) -> object:
    """Add an adapter's output to that of its layer: a tensor, or one with a bias that is added later."""
    hidden, *further = inputs
    product, *others = output if isinstance(output, tuple) else (output,)
    if getattr(layer, "return_layernorm_output", False):
        if isinstance(product, tuple):  # ((product, normed), None)
            product, hidden = product
        else:  # (product, bias, normed)
            hidden = others.pop()
    if next(adapters([layer.adapter])).is_enabled:
        product = product + layer.adapter(hidden, *further)
    return (product, *others) if isinstance(output, tuple) else product


def initialize(modules: Sequence[torch.nn.Module], shape: ModelShape, spec: AdapterSpec, seed: int) -> None:
    """Give adapters the values that a run begins with: A those of PEFT's default distribution, B zeros.

    They depend on the seed and the tensor's name alone, not on the layout.
    """

    def part_of(rule: Rule, rank: int, size: int) -> Tensor:
        ((name, sizes),) = rule.hf.items()
        whole = torch.zeros(sizes)
        if name.endswith(".lora_A.weight"):
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            whole.uniform_(-(sizes[1] ** -0.5), sizes[1] ** -0.5, generator=generator)
        return convert.split(rule, whole, rank, size)

    fill_adapters(modules, shape, spec, part_of)


def adapters(modules: Iterable[torch.nn.Module]) -> Iterator[Adapter]:
    """Yield the adapters of a model's chunks."""
    for chunk in modules:
        for module in chunk.modules():
            if isinstance(module, Adapter):
                yield module


@contextmanager
def adapters_off(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let the model compute with the weights alone: those of the reference."""
    changed = [adapter for adapter in adapters(modules) if adapter.is_enabled]
    try:
        for adapter in changed:
            adapter.is_enabled = False
        yield
    finally:
        for adapter in changed:
            adapter.is_enabled = True


@dataclass
class GradientWatch:
    """Looks for adapters without a gradient in the first optimizer steps that have any.

    In more than one step, as a step may give a layer none by its data: one key gives queries and keys no gradient.
    """

    silent: set[str] | None = None  # names of those without one so far; None before the first step
    num_steps: int = 3

    def look(self, modules: Iterable[torch.nn.Module]) -> None:
        """Look at the gradients of a step whose norm is not 0. A collective of the ranks that have the same layers.

        Of a layer's experts one with a gradient is enough. Raises RuntimeError, which names a layer, after the last of
        the steps, as where something computes with a layer's weight past the layer.
        """
        if not self.num_steps:
            return
        self.num_steps -= 1
        learns: dict[str, Tensor] = {}  # on the device, read once
        for adapter in adapters(modules):
            name = adapter.rule.megatron if adapter.rule.expert is None else adapter.rule.of_expert(0)
            for (place, a), b in zip(adapter.A.named_parameters(), adapter.B.parameters(), strict=True):
                key = f"{name.removesuffix('.weight')}{ADAPTER}B.{place}"
                # While B is zeros A has none; while A is zeros B has none.
                found = a.main_grad.any() | b.main_grad.any()
                learns[key] = learns[key] | found if key in learns else found
        always = torch.ones((), dtype=torch.bool, device=torch.cuda.current_device())
        flags = torch.stack([*learns.values(), always]).int()
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        silent = {name for name, flag in zip(learns, flags.tolist(), strict=False) if not flag}
        self.silent = silent if self.silent is None else self.silent & silent
        if self.silent and not self.num_steps:
            raise RuntimeError(
                f"{len(self.silent)} of {len(learns)} adapters have had no gradient, {min(self.silent)} among them;"
                " leave out what computes with the weight past the layer, or exclude the module (--exclude-modules)"
            )
