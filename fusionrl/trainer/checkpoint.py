"""Checkpoints of the trainer: Megatron's dist_checkpointing, published atomically.

A checkpoint is a folder: Megatron's sharded files and `fusionrl.json` (layout, counters, the model's shape).
With adapters it has these in place of the weights, and `fusionrl.json` names the base that they belong to.
It is written under another name and renamed by rank 0 when it is complete, so that a folder of its name can
be loaded. The optimizer's state is stored in the fully reshardable form: it loads at another tensor,
pipeline, context or data parallel size. RNG states belong to ranks and are restored where the layout is the
same.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import operator
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from fusionrl.base.files import check_facts, facts_of, flush, publish_folder, rename_flushed
from fusionrl.base.process import give_freed_back
from fusionrl.models import convert
from fusionrl.models.hf_folder import TRACKER, weights_folder
from fusionrl.models.hf_io import gather_params, local_adapters
from fusionrl.models.shape import ModelShape, shape_difference
from fusionrl.models.trainable import ADAPTER, Adapted, AdapterSpec, adapted_difference, adapter_rules, saved_in
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer import megatron_core
from fusionrl.trainer.checkpoint_io import PendingFiles, WriterProcess, failing_together, result_queue
from fusionrl.trainer.model import Trained, unwrap
from fusionrl.trainer.process_groups import rng_state, set_rng_state
from fusionrl.trainer.safe_load import only_data

DESCRIPTION = "fusionrl.json"
FORMAT, WITHOUT_HASHES = 2, 1
COUNTERS = {"rollout_id", "optimizer_steps", "skipped"}
# Values that are not shards. Megatron-core 0.19 writes them as one, but prefers this file if it exists.
_COMMON = "common.pt"
_BACKEND = "torch_dist"
# How the optimizer's state is laid out; kept with the checkpoint, as Megatron needs it to load.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def state_hashes(trained: Trained, adapters: AdapterSpec | None = None) -> dict[str, str]:
    """SHA-256 of this rank's weights, optimizer state and RNG states: equal only where all bits are.

    With `adapters`, of these in place of the weights.
    """
    gather_params(trained.chunks)
    weights, optimizer = hashlib.sha256(), hashlib.sha256()
    for chunk in trained.chunks:
        for name, param in chunk.named_parameters():
            if adapters is None or ADAPTER in name:
                weights.update(name.encode())
                weights.update(_bytes_of(param))
    for inner in trained.optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            scalars = [group.get(name) for name in ("step", "lr", "weight_decay")]
            optimizer.update(repr(scalars).encode())
            for param in group["params"]:
                optimizer.update(_bytes_of(param))
                for name, value in sorted(inner.optimizer.state[param].items()):
                    optimizer.update(name.encode())
                    optimizer.update(_bytes_of(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    state = rng_state()
    rng = hashlib.sha256(repr((state["python"], state["numpy"])).encode())
    for value in (state["torch"], state["device"], *(value for _, value in sorted(state["tracker"].items()))):
        rng.update(_bytes_of(value))
    return {"weights": weights.hexdigest(), "optimizer": optimizer.hexdigest(), "rng": rng.hexdigest()}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _metadata() -> dict[str, Any]:
    return _METADATA | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _weights_state(modules: Sequence[torch.nn.Module]) -> dict[str, Any]:
    names = ["model"] if len(modules) == 1 else [f"model{index}" for index in range(len(modules))]
    return {
        name: unwrap(module).sharded_state_dict(metadata=_metadata())
        for name, module in zip(names, modules, strict=True)
    }


def _load(folder: str, state: dict[str, Any], modules: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Read what `state` describes, without running code that the files contain, and put the weights in place."""
    config = maybe_load_config(folder)  # None: Megatron says so itself
    if config is not None and config.sharded_backend != _BACKEND:  # Megatron-core 0.19 reads it as its own
        raise ValueError(f"metadata.json names the backend {config.sharded_backend!r:.40}, not {_BACKEND}")
    with only_data():
        loaded = dist_checkpointing.load(state, folder, get_default_load_sharded_strategy(folder))
    for name, module in zip((name for name in state if name.startswith("model")), modules, strict=True):
        unwrap(module).load_state_dict(loaded[name])
    return loaded


def _trained_state(trained: Trained, shape: ModelShape, adapted: Adapted | None) -> Mapping[str, object]:
    if adapted is None:
        return _weights_state(trained.chunks)
    from fusionrl.trainer.adapter_states import sharded_adapters

    return {"adapters": sharded_adapters(trained.chunks, shape, adapted.adapters)}


def _sharded_state(
    trained: Trained, weights: Mapping[str, object], layout: TrainerLayout, rank: int, loading: bool, with_rng: bool
) -> dict[str, Any]:
    optimizer = trained.optimizer.sharded_state_dict(
        weights if len(weights) > 1 else next(iter(weights.values())), is_loading=loading, metadata=_metadata()
    )
    state = {**weights, "optimizer": optimizer, "scheduler": trained.scheduler.state_dict()}
    if with_rng:
        state["rng"] = ShardedObject("rng", rng_state(), (layout.world_size,), (rank,), replica_id=0)
    return state


class Saving:
    """A checkpoint on its way. What it holds is settled; its files are written, or being written.

    path     where it will be, once `finish` has returned
    rank     of this process
    earlier  of the same checkpoint: several adapters have one each
    """

    earlier: Saving | None = None

    def __init__(self, path: str, rank: int, files: PendingFiles, description: dict[str, Any]) -> None:
        self._final, self._partial = Path(path), Path(path + ".partial")
        self._rank, self._files, self._description = rank, files, description

    def is_done(self) -> bool:
        """Return whether `finish` would not wait for this rank's files."""
        return self._files.is_done() and (self.earlier is None or self.earlier.is_done())

    def finish(self) -> None:
        """Publish it; collective. It replaces one of its name.

        Raises OSError on every rank if one cannot write; what was at the path is then as it was, unless the disk fails
        after the rename.
        """
        try:
            if self.earlier is not None:
                self.earlier.finish()
        finally:  # nothing is being written at its end, even if an earlier one has failed
            self._finish()

    def _finish(self) -> None:
        try:
            self._files.finish()
            with failing_together():
                if self._rank == 0:
                    self._publish()
        except OSError as error:
            raise OSError(f"checkpoint {self._final}: {error}; nothing was published") from error
        del self._files  # with the copies of all tensors, some of them in cycles; a trainer keeps freed blocks
        gc.collect()
        give_freed_back()

    def _publish(self) -> None:
        small = [path.name for path in self._partial.iterdir() if path.name not in self._files.files]
        self._description["files"] = self._files.files | facts_of(self._partial, small)
        with open(self._partial / DESCRIPTION, "w", encoding="utf-8") as file:
            json.dump(self._description, file, indent=2)
        # Each rank's writer has flushed its own files.
        flush((*(self._partial / name for name in (*small, DESCRIPTION)), self._partial))
        _publish(self._partial, self._final)


def begin_save(
    path: str,
    trained: Trained,
    layout: TrainerLayout,
    shape: ModelShape,
    rank: int,
    counters: dict[str, int],
    writer: WriterProcess | None = None,
    adapted: Adapted | None = None,
) -> Saving:
    """Take a copy of what is trained, which may then be trained on, for a checkpoint at `path`; collective.

    An incomplete checkpoint has ".partial" added to its name. `writer` writes meanwhile; without one the files are
    written here, now. `adapted`: of a run that trains adapters.
    """
    partial = Path(path + ".partial")
    gather_params(trained.chunks)
    if trained.replicas is not None:
        trained.replicas.compare(trained.chunks, "a checkpoint, which was not written")
    weights = _trained_state(trained, shape, adapted)
    state = _sharded_state(trained, weights, layout, rank, loading=False, with_rng=True)
    description = {
        "format": FORMAT,
        "layout": dataclasses.asdict(layout),
        "counters": counters,
        "shape": shape.model_dump(mode="json"),
    }
    if adapted is not None:
        description["adapted"] = adapted.model_dump(mode="json")
    return Saving(path, rank, _write_files(state, partial, partial, rank, writer), description)


def _write_files(
    state: dict[str, Any], partial: Path, folder: Path, rank: int, writer: WriterProcess | None
) -> PendingFiles:
    """Remove what an earlier save left at `partial`, and write the files of `state` in `folder` in it; collective."""
    with failing_together():
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            folder.mkdir(parents=True)
    with result_queue() as results:
        request = megatron_core.save_request(state, str(folder), _METADATA)
    return PendingFiles(request, results, writer)


def _publish(partial: Path, final: Path) -> None:
    replaced = final.with_name(final.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    try:
        rename_flushed(partial, final)
    except OSError:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def read_description(path: str) -> dict[str, Any]:
    """Read `fusionrl.json` of the checkpoint at `path`.

    Raises ValueError if no complete checkpoint of this format is there.
    """
    file = Path(path) / DESCRIPTION
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"checkpoint {path}: it cannot be read ({error}); give the folder of a checkpoint") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint {path}: {DESCRIPTION} is not valid JSON ({error})") from error
    if not isinstance(description, dict):
        raise ValueError(f"checkpoint {path}: {DESCRIPTION} is not a JSON object")
    if description.get("format") not in (FORMAT, WITHOUT_HASHES):
        raise ValueError(
            f"checkpoint {path}: format {description.get('format')!r:.40}, this version reads {WITHOUT_HASHES} and"
            f" {FORMAT}"
        )
    if description["format"] == WITHOUT_HASHES and "files" in description:
        raise ValueError(f"checkpoint {path}: {DESCRIPTION} has hashes, and the format that had none; it was changed")
    counters = description.get("counters")
    if not isinstance(counters, dict) or any(type(value) is not int for value in counters.values()):
        raise ValueError(f"checkpoint {path}: the counters in {DESCRIPTION} are not integers")
    if missing := COUNTERS - counters.keys():
        raise ValueError(f"checkpoint {path}: {DESCRIPTION} has no counter {min(missing)}")
    return description


def _check_files(path: str, description: Mapping[str, object], rank: int) -> None:
    """Compare the files with their hashes, each rank its share of them; collective.

    Raises ValueError on every rank if one finds a difference.
    """
    facts, where = description.get("files"), f"checkpoint {path}: it is damaged or incomplete"
    with failing_together(ValueError, "{error}; resume from another one"):
        if isinstance(facts, dict) and facts:
            if _COMMON not in facts and os.path.lexists(Path(path) / _COMMON):
                raise ValueError(f"{where}: {_COMMON} was not saved with it")
            names = sorted(facts)
            facts = {name: facts[name] for name in names[rank % len(names) :: dist.get_world_size()]}
        check_facts(Path(path), facts, where)


def load(
    path: str,
    trained: Trained,
    layout: TrainerLayout,
    shape: ModelShape,
    rank: int,
    adapted: Adapted | None = None,
) -> dict[str, Any]:
    """Restore a checkpoint with its optimizer's options; collective. `adapted`: of a run that trains adapters.

    Returns its counters, and `rng_restored`: whether the layout was the same. Raises ValueError for no complete
    checkpoint, one of another model, of other adapters or another base, or files of it that are missing or damaged.
    """
    description = read_description(path)
    try:
        same_layout = TrainerLayout(**description["layout"]) == layout
        difference = shape_difference(path, description["shape"], shape)
        difference = difference or adapted_difference(path, saved_in(description), adapted, shape)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"checkpoint {path}: another version wrote {DESCRIPTION} ({error})") from error
    if difference is not None:
        raise ValueError(difference)
    if description["format"] != WITHOUT_HASHES:
        _check_files(path, description, rank)
    try:
        weights = _trained_state(trained, shape, adapted)
        state = _sharded_state(trained, weights, layout, rank, loading=True, with_rng=same_layout)
        state = _load(path, state, trained.chunks if adapted is None else [])
        # fp32 master weights are views of the parameters, which want gradients
        with torch.no_grad(), megatron_core.groups_by_content():
            for _, rule, tensor in local_adapters(trained.chunks, shape, adapted.adapters) if adapted else ():
                tensor.copy_(state["adapters"][rule.megatron])
            trained.optimizer.load_state_dict(state["optimizer"])
        # The position alone: Megatron's loader would bring the saved schedule back in place of that of the flags.
        trained.scheduler.num_steps = operator.index(state["scheduler"]["num_steps"])
        if same_layout:
            set_rng_state(state["rng"])
    except (Exception, CheckpointException) as error:  # what misleads fails anywhere in torch and Megatron, in any way
        raise ValueError(
            f"checkpoint {path}: it is damaged or incomplete ({_reason(error)}); resume from another one"
        ) from error
    return description["counters"] | {"rng_restored": same_layout}


def _reason(error: BaseException) -> str:
    """Return an error's last line; torch's class derives from BaseException and holds the errors of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return (lines[-1] if lines else type(error).__name__)[:500]


def load_weights(path: str, modules: list[torch.nn.Module], flag: str = "--megatron-checkpoint") -> None:
    """Read the weights of a Megatron checkpoint, and nothing else of it, at this layout; collective.

    The vocabulary may be padded to any multiple; rows of padding are never tokens. Raises ValueError for no such
    checkpoint, one of another model, or a damaged one.
    """
    folder = weights_folder(path, flag)
    state = _weights_state(modules)
    try:
        _load(str(folder), state, modules)
    except (Exception, CheckpointException) as error:  # what misleads fails anywhere in torch and Megatron, in any way
        raise ValueError(
            f"{flag} {folder}: its weights are not those of --hf-checkpoint's model, or it is damaged "
            f"({_reason(error)})"
        ) from error


def save_weights(path: str, modules: list[torch.nn.Module], rank: int) -> None:
    """Write the weights alone as a Megatron checkpoint that Megatron-LM and slime load as a release; collective.

    Raises ValueError if `path` is there already.
    """
    folder = Path(path)
    partial = folder.with_name(folder.name + ".partial")
    if folder.exists():
        raise ValueError(f"{path}: it exists already; give another folder")
    dist.barrier()
    state = _weights_state(modules) | {"checkpoint_version": 3.0, "iteration": 0}
    _write_files(state, partial, partial / "release", rank, None).finish()
    with failing_together():
        if rank == 0:
            (partial / TRACKER).write_text("release", encoding="utf-8")
            publish_folder(partial, folder)


def saved_adapters(path: str | Path, shape: ModelShape) -> tuple[Adapted, dict[str, torch.Tensor]]:
    """Return what a checkpoint says of its adapters, and their whole tensors by PEFT's names; no collective.

    Raises ValueError if it is not a complete checkpoint with adapters of a model of this shape.
    """
    description = read_description(str(path))
    tensors: dict[str, torch.Tensor] = {}
    try:
        adapted = saved_in(description)
        if adapted is None:
            raise ValueError("it has weights, and no adapters")
        rules = adapter_rules(shape, adapted.adapters)
        with only_data():
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
            parts = {name: torch.empty(rule.sizes, dtype=stored[name].properties.dtype) for name, rule in rules.items()}
            torch.distributed.checkpoint.load(parts, storage_reader=FileSystemReader(path), no_dist=True)
    except (Exception, CheckpointException) as error:  # as in `load`
        raise ValueError(f"checkpoint {path}: its adapters cannot be read ({_reason(error)})") from error
    for name, rule in rules.items():
        tensors |= zip(rule.hf, convert.take_apart(rule, parts[name]), strict=True)
    return adapted, tensors
