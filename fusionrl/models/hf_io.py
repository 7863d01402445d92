"""Weights between Hugging Face folders and Megatron models: reading, and the collective export.

Reading opens only the files, and reads only the tensors, that this rank's pipeline stage needs. Export is a
collective over tensor and pipeline ranks that gives whole tensors one at a time, in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fusionrl.models import convert, families
from fusionrl.models.convert import dequantize, dequantize_mxfp4
from fusionrl.models.hf_folder import Place, StoredTensor, form_of, places, tensor_files, tensors_of
from fusionrl.models.quantization import BLOCKS, SCALE, SCALES, mxfp4_sizes, read_quantization
from fusionrl.models.rules import MTP, HfConfig
from fusionrl.models.shape import ModelShape, read_text_config
from fusionrl.models.trainable import ADAPTER, AdapterSpec, adapter_rules

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from fusionrl.models.peft import PeftFolder


class HFReader:
    """Tensors of a Hugging Face folder by the text model's names, each read at its first use.

    Those in block-wise fp8 or MXFP4 are fp32. Construction and `get` raise ValueError, which names the flag, the file
    and the tensor that is missing, of a wrong shape or cannot be read.
    """

    def __init__(self, folder: str | Path, flag: str = "--hf-checkpoint") -> None:
        self.folder, self.flag = Path(folder), flag
        self._open: dict[Path, safe_open] = {}
        self._files = tensor_files(folder, flag)
        has_config = (self.folder / "config.json").is_file()
        text: HfConfig = read_text_config(folder, flag) if has_config else {}
        self._places, self.form = places(self._files, text), form_of(text)
        self.quantization = read_quantization(folder, flag) if has_config else None

    @property
    def names(self) -> set[str]:
        """Names of all tensors, of one in MXFP4 its own."""
        stacks = {name.removesuffix(BLOCKS) for name in self._files if name.endswith(BLOCKS)}
        return set(self._places) - {name + end for name in stacks for end in (BLOCKS, SCALES)} | stacks

    def place(self, name: str, sizes: Sequence[int] | None = None) -> Place:
        """Return the place of the tensor `name` in the files; by its `sizes`, turned as there."""
        place = self._places.get(name, Place(name))
        if not place.may_turn or sizes is None or (stored := self.stored(name)) is None:
            return place
        return place.turned(tuple(sizes), stored.sizes)

    def stored(self, name: str) -> StoredTensor | None:
        """The tensor of the files that has the tensor `name`; None: there is none."""
        file = self._files.get(self.place(name).name)
        return None if file is None else tensors_of(file, self.flag).get(self.place(name).name)

    def sizes(self, name: str) -> tuple[int, ...]:
        """Sizes of the tensor `name` as its file has them."""
        stored = self.stored(name)
        return () if stored is None else self.place(name).own(stored.sizes)

    def get(self, name: str, shape: Sequence[int], dim: int = 0, part: slice | None = None) -> Tensor:
        """The tensor `name`, which must have `shape`; of dimension `dim` only `part` is read, if that is given."""
        if name + BLOCKS in self._files and dim == 0:
            values, scales = mxfp4_sizes(tuple(shape))
            parts = self.get(name + BLOCKS, values, 0, part), self.get(name + SCALES, scales, 0, part)
            return dequantize_mxfp4(*parts).transpose(1, 2)
        file = self._files.get(self.place(name).name)
        try:
            place, stored = self.place(name, shape), self.stored(name)
            if file is None or stored is None:
                raise ValueError(f"{self.flag} {self.folder}: tensor {name} is in none of its files")
            if stored.sizes != (whole := place.whole(tuple(shape))):
                raise ValueError(
                    f"{self.flag} {file}: tensor {place.name} has shape {stored.sizes}; by config.json it is {whole}"
                )
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            index = place.taken(tuple(shape), dim, part)
            if index is None:
                tensor = self._open[file].get_tensor(place.name)
            else:
                tensor = self._open[file].get_slice(place.name)[index]
                tensor = tensor.t() if place.is_turned else tensor
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.flag} {file}: tensor {name} cannot be read ({error}); fetch it again") from error
        if self.quantization is None or name not in self.quantization.names:
            return tensor
        scales = self.get(name + SCALE, self.quantization.scale_shape(stored.sizes))
        start = 0 if part is None else part.start
        return dequantize(tensor, scales, self.quantization.block, (start, 0) if dim == 0 else (0, start))


class PeftReader(HFReader):
    """Tensors of a PEFT folder by the names of the rules, each read at its first use; raises as `HFReader`."""

    def __init__(self, peft: PeftFolder) -> None:
        self.folder, self.flag, self.form, self.quantization = peft.folder, peft.flag, None, None
        self._open = {}
        self._places = {name: Place(stored) for name, (stored, _) in peft.stored.items()}
        self._files = {stored: tensor.file for stored, tensor in peft.stored.values()}


def read_part(reader: HFReader, rule: families.Rule, rank: int, size: int) -> Tensor:
    """Read the part of a rule's tensor that tensor-parallel `rank` of `size` holds, and no more than that.

    Equal to `convert.split(rule, convert.join(rule, whole tensors), rank, size)`: joining keeps the order of rows
    within each rank's share of them, because ranks hold whole groups and the same rows of gate and up.
    """
    tensors = []
    for name, sizes in rule.hf.items():
        if rule.optional and name not in reader.names:
            assert rule.split == "replicated"
            tensors.append(torch.zeros(sizes))
        elif rule.stack:
            assert rule.expert is not None
            one = slice(rule.expert, rule.expert + 1)
            tensors.append(reader.get(name, rule.stored[name], 0, one)[0])
        else:
            share = rule.share(rank, size, name)
            tensors.append(convert.joined([reader.get(name, sizes, share.dim, part) for part in share.slices], share))
    return convert.join(rule, tensors, size)


def local_tensors(
    chunks: Iterable[torch.nn.Module], shape: ModelShape
) -> Iterator[tuple[str, families.Rule, torch.Tensor]]:
    """(Megatron name as the whole model numbers it, rule, tensor) of this rank's part, without adapters.

    Parameters, and the buffers that the family's table has (a balancing bias of the router). By the shape's `trunk`
    without layers of multi-token prediction.
    """
    rules = families.model_rules(shape)
    for name, tensor in _named_tensors(chunks, shape):
        if isinstance(tensor, torch.nn.Parameter):
            if ADAPTER not in name and (shape.mtp_layers or not name.startswith(MTP)):
                yield name, families.rule_of(name, shape), tensor
        elif name in rules:
            yield name, rules[name], tensor


def local_adapters(
    chunks: Iterable[torch.nn.Module], shape: ModelShape, spec: AdapterSpec
) -> Iterator[tuple[str, families.Rule, torch.Tensor]]:
    """(Megatron name as the whole model numbers it, rule, parameter) of this rank's adapters."""
    rules = adapter_rules(shape, spec)
    for name, tensor in _named_tensors(chunks, shape):
        if ADAPTER in name:
            yield name, rules[name], tensor


def _named_tensors(chunks: Iterable[torch.nn.Module], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(Megatron name as the whole model numbers it, tensor) of this rank's parameters and then its buffers."""
    from megatron.core import parallel_state

    first_expert = 0
    if shape.num_experts:
        ep_size = parallel_state.get_expert_model_parallel_world_size()
        first_expert = parallel_state.get_expert_model_parallel_rank() * (shape.num_experts // ep_size)
    for chunk in chunks:
        module = chunk
        while not hasattr(module, "decoder"):
            module = module.module
        layers = module.decoder.layers
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield families.canonical_name(name, first_layer, first_expert), tensor


def read_local_weights(
    folder: str | Path, chunks: Iterable[torch.nn.Module], shape: ModelShape, flag: str = "--hf-checkpoint"
) -> Iterator[tuple[torch.Tensor, Tensor]]:
    """(tensor, what `folder` has for it, cut to this rank's part of it) of this rank's part of the model."""
    reader, shapes = HFReader(folder, flag), families.hf_shapes(shape)
    ignored = families.ignored(shape)
    scales = {name + SCALE for name in reader.quantization.names} if reader.quantization else set()
    extra = sorted(name for name in reader.names - set(shapes) - scales if not ignored.fullmatch(name))
    if extra:
        raise ValueError(
            f"{flag} {folder}: tensor {extra[0]}"
            + (f" and {len(extra) - 1} more are" if len(extra) > 1 else " is")
            + f" no part of a {shape.model_type} model as config.json describes it"
        )
    for name, rule, tensor in local_tensors(chunks, shape):
        group = split_group(rule)
        part = read_part(reader, rule, group.rank(), group.size())
        assert part.shape == tensor.shape, f"{name}: {tuple(part.shape)} for a tensor of {tuple(tensor.shape)}"
        yield tensor, part


def split_size(rule: families.Rule) -> int:
    """Return the number of ranks over which the rule's tensor is divided."""
    return 1 if rule.split == "replicated" else split_group(rule).size()


def split_group(rule: families.Rule) -> dist.ProcessGroup:
    """The ranks over which the rule's tensor is split."""
    from megatron.core import parallel_state

    if rule.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


@torch.no_grad()
def load_hf(
    folder: str | Path, chunks: Iterable[torch.nn.Module], shape: ModelShape, flag: str = "--hf-checkpoint"
) -> None:
    """Copy the weights of `folder` into this rank's part of the model; raises as `read_local_weights`."""
    for tensor, value in read_local_weights(folder, chunks, shape, flag):
        tensor.copy_(value)


@torch.no_grad()
def fill_adapters(
    chunks: Iterable[torch.nn.Module],
    shape: ModelShape,
    spec: AdapterSpec,
    part_of: Callable[[families.Rule, int, int], Tensor],
) -> None:
    """Copy `part_of(rule, rank, number of ranks that divide the tensor)` into each of this rank's adapters."""
    for _, rule, tensor in local_adapters(chunks, shape, spec):
        group = split_group(rule)
        tensor.copy_(part_of(rule, group.rank(), group.size()))


def load_peft(
    folder: str | Path,
    chunks: Iterable[torch.nn.Module],
    shape: ModelShape,
    spec: AdapterSpec,
    flag: str = "--lora-adapter-path",
) -> None:
    """Copy the adapter of `folder` into this rank's part of the adapters, at any layout.

    Raises ValueError as `read_peft`, and if the folder's adapter is not of `spec`.
    """
    from fusionrl.models.peft import read_peft

    peft = read_peft(folder, shape, flag)
    peft.check(spec)
    fill_adapters(chunks, shape, spec, partial(read_part, PeftReader(peft)))


def gather_params(chunks: Iterable[torch.nn.Module]) -> None:
    """Complete the parameters: with overlapped gathering they are a step old until a forward pass."""
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def iter_hf_tensors(
    model_chunks: Sequence[torch.nn.Module],
    transformer_config: TransformerConfig,
    shape: ModelShape,
    value_of: Callable[[families.Rule, Tensor], Tensor] | None = None,
    adapters: AdapterSpec | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of the model, in one order that is the same on every rank.

    Collective over tensor-, expert- and pipeline-parallel ranks: every rank must exhaust it. Few tensors stand whole
    at a time: one, or one expert of each expert-parallel rank; of a stack, all experts of a layer. The order is that of
    `families.hf_shapes`, but that the experts with the same place on their ranks come together.

    `value_of` says what to export of a parameter, `dtype` the type of values that are not always in fp32, if not the
    model's. With `adapters` their tensors are exported, by PEFT's names, in place of the model's.
    """
    from megatron.core import parallel_state

    gather_params(model_chunks)
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    ep_group = parallel_state.get_expert_model_parallel_group()
    experts_per_rank = shape.num_experts // ep_group.size() or 1
    if adapters is None:
        rules, held = families.model_rules(shape), local_tensors(model_chunks, shape)
    else:
        rules, held = adapter_rules(shape, adapters), local_adapters(model_chunks, shape, adapters)
    local = {name: tensor for name, _, tensor in held}
    stages: list[set[str]] = [set(local)]
    if pp_group.size() > 1:
        stages = [set()] * pp_group.size()
        dist.all_gather_object(stages, set(local), group=pp_group)
    device = next(iter(local.values())).device if local else torch.device("cpu")
    for rule in rules.values():
        same_place, mine = [rule], rule
        if rule.expert is not None:
            if rule.expert >= (1 if rule.stack else experts_per_rank):
                continue  # comes with the one of the same place on the first rank, or with the first of its stack
            numbers = range(rule.expert, experts_per_rank * ep_group.size(), experts_per_rank)
            same_place = [rules[rule.of_expert(number)] for number in numbers]
            mine = same_place[ep_group.rank()]
        owner = next(index for index, names in enumerate(stages) if mine.megatron in names)
        tensors: list[Tensor] | None = None
        if owner == pp_group.rank() and rule.stack:
            tensors = [_stacked(rule, lambda name: (rules[name], _value(rules[name], local[name], value_of)), ep_group)]
        elif owner == pp_group.rank():
            full = _whole(rule, _value(mine, local[mine.megatron], None if rule.buffer else value_of))
            wholes = [full] if rule.expert is None else _all_gather(full, ep_group)
            tensors = [
                part
                for placed, gathered in zip(same_place, wholes, strict=True)
                for part in convert.take_apart(placed, gathered)
            ]
        names = {hf: sizes for placed in same_place for hf, sizes in placed.stored.items()}
        if pp_group.size() > 1:
            if tensors is None:
                own = torch.float32 if rule.is_fp32 else dtype or transformer_config.params_dtype
                tensors = [torch.empty(sizes, dtype=own, device=device) for sizes in names.values()]
            tensors = [tensor.contiguous() for tensor in tensors]
            for tensor in tensors:
                dist.broadcast(tensor, src=dist.get_global_rank(pp_group, owner), group=pp_group)
        assert tensors is not None
        yield from zip(names, tensors, strict=True)


def _value(rule: families.Rule, tensor: Tensor, value_of: Callable[[families.Rule, Tensor], Tensor] | None) -> Tensor:
    return (tensor if value_of is None else value_of(rule, tensor)).detach()


def _stacked(
    rule: families.Rule, held: Callable[[str], tuple[families.Rule, Tensor]], ep_group: dist.ProcessGroup
) -> Tensor:
    """The stack whose first expert's rule is `rule`: each rank puts its experts in and gives them to the others.

    `held`: Megatron name of one of this rank's → (its rule, its value).
    """
    size, place = rule.stack // ep_group.size(), ep_group.rank()
    _, value = held(rule.of_expert(place * size))
    (sizes,) = rule.stored.values()
    full = value.new_empty(sizes)
    for rank, part in enumerate(full.split(size)):
        if rank == place:
            for number, expert in enumerate(part, place * size):
                expert.copy_(convert.take_apart(*held(rule.of_expert(number)))[0])
        if ep_group.size() > 1:
            dist.broadcast(part, dist.get_global_rank(ep_group, rank), group=ep_group)
    return full


def _whole(rule: families.Rule, part: Tensor) -> Tensor:
    return convert.gather(rule, [part] if rule.split == "replicated" else _all_gather(part, split_group(rule)))


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(tensors, tensor.contiguous(), group=group)
    return tensors
