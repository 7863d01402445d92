"""Weights between Hugging Face folders and Megatron models: reading, the collective export, writing.

Reading opens only the files, and reads only the tensors, that this rank's pipeline stage needs. Export is a
collective over tensor and pipeline ranks that gives whole tensors one at a time, in one order on all ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fusionrl.config.model_shape import ModelShape
from fusionrl.weights import families

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Weights in any of their forms; everything else of a model folder is copied beside exported weights.
_WEIGHT_FILES = (
    "*.safetensors",
    "*.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
)


class HFReader:
    """Tensors of a Hugging Face folder by name, each read when it is asked for.

    Raises (on construction and by `get`):
        ValueError: names the flag, the file and the tensor that is missing, of a wrong shape or cannot be
            read.
    """

    def __init__(self, folder: str | Path, flag: str = "--hf-checkpoint") -> None:
        self.folder, self.flag = Path(folder), flag
        self._open: dict[str, Any] = {}
        self._files = self._read_index()

    def _read_index(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{self.flag} {index}: no valid index of weights ({error!r})") from error
        if not (self.folder / SINGLE).is_file():
            raise ValueError(
                f"{self.flag} {self.folder}: it has neither {SINGLE} nor {INDEX}; "
                "convert other formats with transformers' save_pretrained"
            )
        return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{self.flag} {self.folder / file}: not a complete safetensors file ({error}); fetch it again"
                ) from error
        return self._open[file]

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor `name`, which must have `shape`."""
        if name not in self._files:
            raise ValueError(f"{self.flag} {self.folder}: tensor {name} is in none of its files")
        file = self._files[name]
        try:
            tensor = self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self.flag} {self.folder / file}: tensor {name} cannot be read ({error})") from error
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{self.flag} {self.folder / file}: tensor {name} has shape {tuple(tensor.shape)}; "
                f"by config.json it is {tuple(shape)}"
            )
        return tensor


def local_parameters(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(canonical Megatron name with the layer's global number, parameter) of this rank's part."""
    for chunk in chunks:
        module = chunk
        while not hasattr(module, "decoder"):
            module = module.module
        layers = module.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        for name, param in module.named_parameters():
            head, _, rest = name.partition("decoder.layers.")
            if not head and rest:
                number, _, tail = rest.partition(".")
                name = f"decoder.layers.{int(number) + offset}.{tail}"
            yield families.canonical_name(name), param


def read_local_weights(
    folder: str | Path, chunks: Iterable[torch.nn.Module], shape: ModelShape, flag: str = "--hf-checkpoint"
) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """(parameter, what `folder` has for it, cut to this tensor-parallel rank) of this rank's part of the
    model.

    Raises:
        ValueError: see `HFReader`; also a tensor in the folder that the family does not have.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    reader, rules, shapes = HFReader(folder, flag), families.model_rules(shape), families.hf_shapes(shape)
    extra = sorted(name for name in reader.names - set(shapes) if not families.IGNORED.fullmatch(name))
    if extra:
        raise ValueError(
            f"{flag} {folder}: tensor {extra[0]}"
            + (f" and {len(extra) - 1} more are" if len(extra) > 1 else " is")
            + f" no part of a {shape.model_type} model as config.json describes it"
        )
    for name, param in local_parameters(chunks):
        rule = families.rule_of(name, shape, rules)
        full = families.join(rule, [reader.get(hf, shapes[hf]) for hf in rule.hf], shape)
        part = families.split(rule, full, rank, size)
        assert part.shape == param.shape, f"{name}: {tuple(part.shape)} for a parameter of {tuple(param.shape)}"
        yield param, part


@torch.no_grad()
def load_hf(
    folder: str | Path, chunks: Iterable[torch.nn.Module], shape: ModelShape, flag: str = "--hf-checkpoint"
) -> None:
    """Copy the weights of `folder` into this rank's part of the model; raises as `read_local_weights`."""
    for param, tensor in read_local_weights(folder, chunks, shape, flag):
        param.copy_(tensor)


@torch.no_grad()
def iter_hf_tensors(
    model_chunks: Sequence[torch.nn.Module], transformer_config: Any, shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of the model, in the order of `families.hf_shapes`, on every rank.

    Collective over tensor- and pipeline-parallel ranks: every rank must exhaust it. One tensor stands whole
    at a time. A tensor may share its memory with the model: copy what must outlive the next optimizer step.

    Args:
        model_chunks: this rank's pipeline chunks, wrapped or not.
        transformer_config: Megatron's TransformerConfig of the model (precision of the tensors).
        shape: the model's shape.
    """
    from megatron.core import parallel_state

    for chunk in model_chunks:
        # With overlapped gathering the parameters are one step old until they are first used.
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            chunk.start_param_sync(force_sync=True)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    own = dict(local_parameters(model_chunks))
    stages: list[set[str]] = [set(own)]
    if pp_group.size() > 1:
        stages = [set()] * pp_group.size()
        dist.all_gather_object(stages, set(own), group=pp_group)
    shapes = families.hf_shapes(shape)
    for name, rule in families.model_rules(shape).items():
        owner = next(index for index, names in enumerate(stages) if name in names)
        tensors: list[Tensor] | None = None
        if name in own and owner == pp_group.rank():
            param = own[name].detach()
            parts = [param]
            if tp_group.size() > 1 and rule.split != "replicated":
                parts = [torch.empty_like(param) for _ in range(tp_group.size())]
                dist.all_gather(parts, param.contiguous(), group=tp_group)
            tensors = families.take_apart(rule, families.gather(rule, parts, shape), shape)
        if pp_group.size() > 1:
            device = next(iter(own.values())).device
            if tensors is None:
                dtype = transformer_config.params_dtype
                tensors = [torch.empty(shapes[hf], dtype=dtype, device=device) for hf in rule.hf]
            tensors = [tensor.contiguous() for tensor in tensors]
            for tensor in tensors:
                dist.broadcast(tensor, src=dist.get_global_rank(pp_group, owner), group=pp_group)
        assert tensors is not None
        yield from zip(rule.hf, tensors, strict=True)


def save_hf(
    path: str | Path,
    source: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    write: bool,
    max_file_bytes: int = 5 * 1024**3,
) -> None:
    """Write `tensors` as a Hugging Face folder, with the config and tokenizer files of the folder `source`.

    Every rank iterates `tensors`; the one with `write` writes, into a temporary folder that is renamed at
    the end, so that a folder of that name is always complete. Files are split, and an index written, beyond
    `max_file_bytes`. config.json gets the dtype of the tensors.

    Raises:
        ValueError: `path` is there already.
    """
    path = Path(path)
    if not write:
        for _ in tensors:
            pass
        return
    if path.exists():
        raise ValueError(f"--save-hf {path}: it exists already; give another folder, or {{rollout_id}} in its name")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0
    dtype = torch.float32

    def flush() -> None:
        save_file(pending, partial / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + num_bytes > max_file_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes, total_bytes, dtype = pending_bytes + num_bytes, total_bytes + num_bytes, tensor.dtype
    flush()
    if len(files) == 1:
        (partial / "part-0.safetensors").rename(partial / SINGLE)
    else:
        weight_map = {}
        for index, names in enumerate(files):
            final = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
            (partial / f"part-{index}.safetensors").rename(partial / final)
            weight_map.update(dict.fromkeys(names, final))
        text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
        (partial / INDEX).write_text(text + "\n", encoding="utf-8")
    _copy_companions(Path(source), partial, str(dtype).removeprefix("torch."))
    partial.rename(path)


def _copy_companions(source: Path, target: Path, dtype: str) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes "dtype", transformers 4 "torch_dtype".
    config["dtype" if "torch_dtype" not in config else "torch_dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
