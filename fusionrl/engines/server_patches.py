"""What fusionrl changes in SGLang's servers from outside, on every device: rendezvous, stamps of streams, model checks.

`install_rendezvous` connects SGLang's ranks to each other and to the trainers without a TCPStore that strangers can
write to. It replaces torch's handler of `tcp://host:port`, where SGLang meets:

* SGLang's own ranks meet in a file of the engine's temporary folder; those of an engine over several nodes in a store
  of rank 0 that takes connections from the run's nodes alone;
* a trainer is met, for a weight push, in the store that it made (`fusionrl.base.group_stores`). All members of the
  group wait there for each other, and NCCL's communicator is made at once.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse
from weakref import WeakSet

from fusionrl.base.imports import when_imported
from fusionrl.engines import NODES_VARIABLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fusionrl.models.shape import ModelShape

logger = logging.getLogger(__name__)


def install_rendezvous() -> None:
    """Replace the handler, and the constructor of groups that SGLang calls; imports torch. Idempotent."""
    from torch.distributed import distributed_c10d as c10d

    from fusionrl.base.group_stores import connecting

    # `torch.distributed.rendezvous` is the function of that name.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    if handlers.get("tcp") is not _meet:
        handlers["tcp"] = _meet
        c10d._new_process_group_helper = connecting(c10d._new_process_group_helper)


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: object) -> Iterator[tuple[object, int, int]]:
    import torch.distributed as dist

    from fusionrl.base.group_stores import engine_store, join_group_store, meet

    address = urlparse(url)
    query = {name: int(values[0]) for name, values in parse_qs(address.query).items() if name in ("rank", "world_size")}
    assert address.hostname is not None and address.port is not None
    if dist.is_initialized():  # then it is not SGLang's own world
        store = join_group_store(address.hostname, address.port, timeout.total_seconds())
        meet(store, query["rank"], query["world_size"], timeout.total_seconds())
    elif NODES_VARIABLE in os.environ:
        is_master = query["rank"] == 0
        store = engine_store(address.hostname, address.port, timeout.total_seconds(), is_master=is_master)
    else:
        folder = os.environ.get("TMPDIR", tempfile.gettempdir())  # the engine's own, see `EngineActor`
        store = dist.FileStore(str(Path(folder, f"world-{address.port}")), query["world_size"])
        store.set_timeout(timeout)
    yield store, query["rank"], query["world_size"]


def stamp_streams() -> None:
    """Let each event of a stream say which weights sampled which of its tokens. Idempotent.

    For schedulers of this process, and of those forked from it. SGLang's tell it with the last event of an answer,
    which an engine that dies does not send. The events before have the version of the moment, too new for tokens that
    were on their way through the detokenizer at an update.

    At a pause `in_place` of an engine that schedules ahead, as on a GPU, the token that is being sampled counts as one
    of the new weights, in the last event too.
    """
    try:
        from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
        from sglang.srt.utils.weight_versions import compute_weight_version_spans
    except ImportError as error:  # another version of SGLang has them elsewhere
        logger.warning("the events of a stream tell the weight version of the moment, but for the last one: %s", error)
        return

    accept_without_versions = _GenerationStreamAccumulator.accept
    if getattr(accept_without_versions, "tells_versions", False):
        return

    def accept(self: Any, *, req: Any) -> None:
        before = len(self.weight_versions)
        accept_without_versions(self, req=req)
        if req.stream and len(self.weight_versions) > before and self.weight_versions[-1] is None:
            self.weight_versions[-1] = compute_weight_version_spans(
                req.weight_version_events, self.current_weight_version, len(req.output_ids)
            )

    accept.tells_versions = True  # type: ignore[attr-defined]
    _GenerationStreamAccumulator.accept = accept


def add_seeds() -> None:
    """Let prompt i of a request with several prompts and one `sampling_seed` have the seed + i: for requests that
    `RequestMerger` sends. SGLang would give all of them the same seed, and the same answer.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    copy_to_prompts = GenerateReqInput._normalize_sampling_params

    def normalize(self: GenerateReqInput, num: int) -> None:
        params = self.sampling_params
        copy_to_prompts(self, num)
        if isinstance(params, dict) and isinstance(seed := params.get("sampling_seed"), int):
            self.sampling_params = [{**params, "sampling_seed": seed + i} for i in range(num)]

    GenerateReqInput._normalize_sampling_params = normalize


_ENDS = ("embed_tokens.weight", "lm_head.weight")
_TOWER = "visual"  # name of a vision tower in SGLang's models
_TOWER_EPSILON = 1e-6  # of its norms in trainers, and in transformers
_DRAFTERS = ("MTP", "NextN")  # how such class names of SGLang end


class WrongModel(RuntimeError):
    """The engine's model is not that of its folder."""


def check_models() -> None:
    """Check models that schedulers of this process, and of those forked from it, load from files. Call it once.

    SGLang skips tensors whose names it does not know, and starts with whatever memory held where all of them are so. It
    also takes defaults of its own for fields of config.json that it looks for elsewhere than transformers does. Either
    engine would answer, with other log-probs than the trainers'.
    """
    when_imported("sglang.srt.model_loader.loader", _watch)


def _watch(loader: ModuleType) -> None:
    kind = getattr(loader, "DefaultModelLoader", None)
    if kind is None or not hasattr(kind, "load_weights_only"):
        logger.warning("this SGLang loads weights in another way; fusionrl cannot check that it finds them")
        return
    original: Callable[..., None] = kind.load_weights_only
    seen: WeakSet[torch.nn.Module] = WeakSet()  # a later load is a weight push by files, perhaps of a part

    def load_weights_only(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]], target_device: object) -> None:
        weights = _of_text_model(model, weights)
        if model in seen:
            original(model, weights, target_device)
            return
        seen.add(model)
        check_loaded(model, lambda: original(model, weights, target_device))
        _check_reading(model)

    kind.load_weights_only = staticmethod(load_weights_only)
    _watch_dummy(loader)


def _watch_dummy(loader: ModuleType) -> None:
    """Check an engine's reading of config.json also where trainers push all of its weights."""
    kind = getattr(loader, "DummyModelLoader", None)
    if kind is None:
        return
    original: Callable[..., torch.nn.Module] = kind.load_model

    def load_model(self: object, **options: object) -> torch.nn.Module:
        model = original(self, **options)
        _check_reading(model)
        return model

    kind.load_model = load_model


def _of_text_model(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """The weights under the text model's names, where files may have those of a multimodal model around it."""
    from fusionrl.models.hf_folder import form_of, text_name
    from fusionrl.models.vision import NAMES

    form = form_of({"model_type": getattr(getattr(model, "config", None), "model_type", "")})
    if form is None:
        return weights
    named = ((text_name(name, form), tensor) for name, tensor in weights)
    has_tower = hasattr(model, _TOWER)
    return ((name, tensor) for name, tensor in named if has_tower or not name.startswith(NAMES))


def check_loaded(model: torch.nn.Module, load: Callable[[], None]) -> None:
    """Call `load`, and see that it writes the first number of every matrix of the model.

    Raises:
        WrongModel: it leaves one as it was.
    """
    for _, first in _firsts(model):
        first.fill_(math.nan)
    load()
    firsts = dict(_firsts(model))  # some loaders put other tensors in their place
    if missing := [name for name, first in firsts.items() if first.float().isnan().item()]:
        raise WrongModel(
            f"SGLang has found no weights of {len(missing)} of {len(firsts)} matrices, the first {missing[0]}: the"
            f" files name them otherwise than {type(model).__name__} does; give a folder as transformers saves it"
        )


def _firsts(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and first number of each matrix of a layer.

    Norms, biases and scales of a quantisation may have defaults, and a drafting model takes its ends from another.
    """
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1 and parameter.is_floating_point() and not parameter.is_meta
        if is_matrix and name.endswith("weight") and not name.endswith(_ENDS):
            yield name, parameter.data[(0,) * parameter.dim()]


def _check_reading(model: torch.nn.Module) -> None:
    from fusionrl.models.shape import read_model_shape

    folder = Path(getattr(getattr(model, "config", None), "_name_or_path", "") or "-")
    try:
        shape = read_model_shape(folder)
    except ValueError:  # an engine may serve a family that no trainer here knows
        return
    if errors := reading_errors(model, shape):
        raise WrongModel(f"{folder}/config.json: {'; '.join(errors)}; the engine would disagree with the trainers")


def reading_errors(model: torch.nn.Module, shape: ModelShape) -> list[str]:
    """Compare the numbers that SGLang built its layers with and those that trainers read in the same config.json."""
    # Those of a layer of multi-token prediction, which drafts, begin anew: its number there is another layer's here.
    is_draft = type(model).__name__.endswith(_DRAFTERS)
    numbers = [(-1 if is_draft else layer, of, value) for layer, of, value in _numbers(model)]
    kinds = [kind for kind in dict.fromkeys(shape.attention) if kind.rotary_dim(shape)]
    errors = []
    for name in ("rope_theta", "rotary_dim", "rms_norm_eps", "sliding_window"):
        for layer in sorted({layer for layer, of, _ in numbers if of == name and layer < shape.num_layers}):
            of_layer = kinds if layer < 0 else [shape.attention[layer]]
            right = {
                "rope_theta": [kind.rotary_base(shape) for kind in of_layer],
                "rotary_dim": [float(kind.rotary_dim(shape)) for kind in of_layer],
                "rms_norm_eps": [shape.rms_norm_eps],
                "sliding_window": [float(kind.window or 0) for kind in of_layer],
            }[name]
            values = sorted({value for place, of, value in numbers if (place, of) == (layer, name)})
            if wrong := [value for value in values if not any(math.isclose(value, one) for one in right)]:
                read, told = (", ".join(f"{x:g}" if x else "none" for x in side) for side in (wrong, right))
                errors.append(f"SGLang reads {name} {read} where trainers read {told}")
    # SGLang gives norms of a vision tower the text model's epsilon.
    norms = [*tower.modules()] if (tower := getattr(model, _TOWER, None)) is not None else []
    epsilons = [getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms]
    if wrong := sorted({value for value in epsilons if isinstance(value, float)} - {_TOWER_EPSILON}):
        errors.append(f"SGLang takes {wrong[0]:g} in norms of the vision tower where trainers take {_TOWER_EPSILON:g}")
    return list(dict.fromkeys(errors))


def _numbers(model: torch.nn.Module) -> Iterator[tuple[int, str, float]]:
    """(layer, field, number) of what SGLang's layers say of themselves; layer -1: of a module that several may use."""
    for place, module in model.named_modules():
        if place == _TOWER or place.startswith(f"{_TOWER}."):
            continue
        children = [child for name, child in module.named_children() if name != _TOWER]
        layer = next((child.layer_id for child in children if _number(child, "sliding_window") is not None), -1)
        for child in children:
            for name in ("rope_theta", "rotary_dim", "rms_norm_eps", "sliding_window"):
                if (value := _number(child, name)) is not None:
                    yield (-1 if name == "rms_norm_eps" else layer), name, value


def _number(module: torch.nn.Module, name: str) -> float | None:
    """The number that a layer in SGLang has for this field; None: the layer has none."""
    is_rotary = hasattr(module, "rotary_dim") and hasattr(module, "base")
    if name == "rope_theta" and is_rotary:
        return float(module.base)
    if name == "rotary_dim" and is_rotary:
        return float(module.rotary_dim)
    if name == "rms_norm_eps" and hasattr(module, "variance_epsilon"):
        return float(module.variance_epsilon)
    if name == "sliding_window" and hasattr(module, "sliding_window_size") and hasattr(module, "qk_head_dim"):
        # SGLang's number leaves the token itself out; -1: it attends to all.
        return float(-1 if module.sliding_window_size is None else module.sliding_window_size) + 1
    return None
