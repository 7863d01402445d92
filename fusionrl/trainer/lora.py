"""Low-rank adapters of Megatron's linear layers, one for each Hugging Face tensor that a layer's weight joins.

A layer gets a child `adapter`, whose output a forward hook adds to the layer's. Of a layer whose rows are divided over
tensor-parallel ranks, each rank has A whole and its rows of B; of one whose columns are, its columns of A and B whole.
So [tokens, rank] crosses ranks, not [tokens, hidden]. Weights keep their values and want no gradients (`freezing.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

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
from fusionrl.models.adapters import ADAPTER, AdapterSpec, adapter_rules
from fusionrl.models.hf_io import local_adapters, local_tensors, split_group
from fusionrl.models.peft_folder import load_peft
from fusionrl.models.rules import Rule
from fusionrl.models.shape import ModelShape


class Matrices(torch.nn.Module):
    """A or B of a layer, by the place of the Hugging Face tensor in the weight's rule.

    Part of no module's state: checkpoints of weights have none, and those of adapters are made by their rules.
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
                own = rules.get(f"{prefix}{kind}.{place}")
                if own is not None:
                    sizes = convert.split(own, torch.empty(own.sizes, device="meta"), 0, self.size).shape
                    matrix = torch.nn.Parameter(torch.empty(sizes, dtype=config.params_dtype, device=device))
                    self._mark(matrix, own)
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
        """Return what is added to the layer's output for its input `hidden` [..., in]."""
        a, b = self.factors()
        return F.linear(self._crossed(F.linear(self.dropped(hidden), a) * self.spec.scale), b)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B of the joined weight."""
        a, b = self.joined_a(), self.joined_b()
        if self.size > 1 and self.rule.expert is not None:
            # The ranks' outputs are summed later: so must be the gradients of what all of them have.
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

    def joined_a(self) -> Tensor:
        """Return the matrices A, one over the other [matrices * rank, in]."""
        matrices = list(self.A().values())
        return torch.cat(matrices) if len(matrices) > 1 else matrices[0]

    def joined_b(self) -> Tensor:
        """Return B of the joined weight [out, matrices * rank]: rows have values in the columns of their own matrix."""
        rank, matrices = self.spec.rank, self.B()
        count = len(matrices)
        if len(self.rule.hf) == 1:
            return matrices["0"]
        parts, column = [], 0
        for place, (rows, _) in enumerate(self.rule.hf.values()):
            if str(place) in matrices:
                parts.append(F.pad(matrices[str(place)], (column, (count - 1) * rank - column)))
                column += rank
            else:
                own = rows // self.size if self.by_rows else rows
                parts.append(next(iter(matrices.values())).new_zeros(own, count * rank))
        if self.rule.join != "grouped":
            return torch.cat(parts)
        groups = self.rule.groups // (self.size if self.by_rows else 1)
        return torch.cat([part.view(groups, -1, count * rank) for part in parts], 1).flatten(0, 1)

    def dropped(self, hidden: Tensor) -> Tensor:
        """Drop values of an input: others on each rank, unless ranks have the same one."""
        if not (self.training and self.spec.dropout):
            return hidden
        randomness: AbstractContextManager[object] = nullcontext()
        if self.rule.expert is not None:
            randomness = get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        elif self.by_columns or self.has_sequence_part:
            randomness = get_cuda_rng_tracker().fork()
        with randomness:
            return F.dropout(hidden, self.spec.dropout)


class GroupedAdapter(torch.nn.ModuleList):
    """The adapters of a layer that computes all experts of a rank at once, whose tokens follow one another."""

    def forward(self, hidden: Tensor, splits: Sequence[int] | Tensor) -> Tensor:
        """Return what is added to the output for `hidden` [tokens, in], of which expert i has `splits[i]`."""
        experts: list[Adapter] = list(self)
        ends = torch.as_tensor(splits).cumsum(0).to(hidden.device, torch.int32)
        a, b = (torch.stack(factors).mT for factors in zip(*(expert.factors() for expert in experts), strict=True))
        low = _grouped(experts[0].dropped(hidden), a, ends) * experts[0].spec.scale
        return _grouped(low, b, ends)


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [tokens, in] by the matrix [experts, in, out] of their expert; its rows end at `ends` [experts]."""
    if rows.size(-1) * rows.itemsize % 16 == 0 and matrices.size(-1) * rows.itemsize % 16 == 0:
        return F.grouped_mm(rows, matrices, offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()  # a kernel takes no such rows
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
        made = [Adapter(rule, spec, rules, transformer) for rule in weights]
        is_grouped = hasattr(layer, "num_gemms")  # Transformer Engine's, also with one expert
        layer.adapter = GroupedAdapter(made) if is_grouped else made[0]
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


@torch.no_grad()
def initialize(modules: Sequence[torch.nn.Module], shape: ModelShape, spec: AdapterSpec, seed: int) -> None:
    """Give adapters the values that a run begins with: A those of PEFT's default distribution, B zeros.

    They depend on the seed and the tensor's name alone, not on the layout.
    """
    for _, rule, matrix in local_adapters(modules, shape, spec):
        ((name, sizes),) = rule.hf.items()
        if name.endswith(".lora_B.weight"):
            matrix.zero_()
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        bound = sizes[1] ** -0.5
        whole = torch.empty(sizes).uniform_(-bound, bound, generator=generator)
        group = split_group(rule)
        matrix.copy_(convert.split(rule, whole, group.rank(), group.size()))


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


def check_gradients(modules: Iterable[torch.nn.Module]) -> None:
    """Look at the gradients of the first step that has any: each B learns, as long as no A is zero.

    A collective of the ranks that have the same layers. An expert may have no token, but not all of a layer.
    Raises RuntimeError, which names the layers that learn nothing, as where something bypasses the layer's hook.
    """
    learns: dict[str, bool] = {}
    for adapter in adapters(modules):
        name = adapter.rule.megatron if adapter.rule.expert is None else adapter.rule.of_expert(0)
        for place, matrix in adapter.B.named_parameters():
            key = f"{name.removesuffix('.weight')}{ADAPTER}B.{place}"
            learns[key] = learns.get(key, False) or bool(matrix.main_grad.any())
    flags = torch.tensor([*learns.values(), True], dtype=torch.int, device=torch.cuda.current_device())
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    silent = [name for name, flag in zip(learns, flags.tolist(), strict=False) if not flag]
    if silent:
        raise RuntimeError(
            f"{len(silent)} of {len(learns)} adapters get no gradient, {silent[0]} among them; leave out what computes"
            " with the layer's weight past the layer, or exclude the module (--exclude-modules)"
        )
