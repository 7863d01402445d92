"""Megatron-core as a trainer needs it: its versions, Adam where Transformer Engine is absent, its timers as spans.

All differences between the supported versions, 0.16.1 and 0.19.x, are here:

| what | 0.16.1 | 0.19.x |
|---|---|---|
| triton | not imported | imported at module level: a stand-in answers where CUDA is missing |
| asynchronous saving | one way | two ways, `async_strategy`; "mcore" is the one that needs no other package |
| an MLP in a layer's spec | a `ModuleSpec` | a function that builds it |
| queries that are not compressed (MLA) | a norm of them is ignored | refused; their projection must be fused with one |
| norms of queries and keys in a spec, without `qk_layernorm` | are built | are refused |
| layers of multi-token prediction | have a `transformer_layer` | have a `mtp_model_layer`, and get a mask of padding |
| groups of parameters in a checkpoint | found by what they hold | by their rates, too: a resume with others fails |
| checkpoint values outside shards | common.pt | a shard, but common.pt where that is: it must be among the files |
| the backend in a checkpoint's metadata.json | checked | not read: `trainer/checkpoint.py` checks it |
| what makes a storage of a pickle | torch's function | its own, which SGLang refuses: `weight_payload.py` renames it |
| names of Transformer Engine without it | some are missing | others are missing |
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fusionrl.observe.spans import note, recorder

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_latent_attention import QKNormConfigResolver
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    from fusionrl.trainer.model import Trained

_GROUP_CONTENT = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def without_te() -> None:
    """Give Megatron-core an Adam, and mend names, that it has only with Transformer Engine; nothing where that is."""
    _use_fused_adam()
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("TELinear", (), {})
    resolver = getattr(multi_latent_attention, "QKNormConfigResolver", None)
    if resolver is None or hasattr(resolver, "_fused_or_default"):
        return
    fused = resolver._fused_or_default = resolver._mla_fused_linear_or_default

    def projection(self: QKNormConfigResolver, module_spec: ModuleSpec | type, module_name: str) -> object:
        if module_name == "linear_q_proj" and self.config.transformer_impl == "local":
            return module_spec
        return fused(self, module_spec, module_name)

    resolver._mla_fused_linear_or_default = projection


@contextmanager
def groups_by_content() -> Iterator[None]:
    """Let a checkpoint's groups of parameters be found by what they hold, and not by rates, which flags may change."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    modules: tuple[Any, ...] = (optimizer, distrib_optimizer)  # each has the name as its own
    before = optimizer.param_group_identifier_keys
    try:
        for module in modules:
            module.param_group_identifier_keys = _GROUP_CONTENT
        yield
    finally:
        for module in modules:
            module.param_group_identifier_keys = before


def save_request(state: Mapping[str, object], folder: str, metadata: Mapping[str, object]) -> AsyncRequest:
    """Megatron's AsyncRequest for saving `state` in `folder`: planned over all ranks, nothing of it written yet."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    takes = inspect.signature(dist_checkpointing.save).parameters
    more = {"async_strategy": "mcore"} if "async_strategy" in takes else {}
    return dist_checkpointing.save(
        state,
        folder,
        get_default_save_sharded_strategy(),
        async_sharded_save=True,
        content_metadata=dict(metadata),
        **more,
    )


def mlp_submodules(layer: TransformerLayerSubmodules) -> MLPSubmodules:
    """Submodules of the MLP in a layer's submodules."""
    from megatron.core.transformer import ModuleSpec

    return layer.mlp.submodules if isinstance(layer.mlp, ModuleSpec) else layer.mlp.keywords["submodules"]


def set_mlp_module(layer: TransformerLayerSubmodules, module: type[MLP]) -> None:
    """Make `module` the class of the MLP in a layer's submodules."""
    from megatron.core.transformer import ModuleSpec

    if isinstance(layer.mlp, ModuleSpec):
        layer.mlp.module = module
    else:
        layer.mlp = functools.partial(module.as_mlp_submodule, *layer.mlp.args, **layer.mlp.keywords)


class FusedAdam(torch.optim.Optimizer):
    """Decoupled weight decay Adam (arXiv 1711.05101) with fp32 moments and a step count a group.

    Megatron-core falls back to torch's AdamW, whose step count is a tensor a parameter: a fresh optimizer cannot
    describe its state for a checkpoint, and after a load all parameters share one step tensor, so that the bias
    correction is silently wrong. The kernel is torch's own; the bookkeeping is that of Transformer Engine's FusedAdam.

    Raises ValueError for an option of FusedAdam that torch's kernel does not have.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **unused: object,
    ) -> None:
        if not (bias_correction and adam_w_mode):
            raise ValueError("Adam without bias correction, or with weight decay in the gradient, is not supported")
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, grad_scaler: object = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None, "Megatron-core's optimizers use none"
        assert grad_scaler is None, "Megatron-core's optimizers use none"
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not params:
                continue
            for param in params:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
            step = torch.tensor(float(group["step"]), device=params[0].device)
            torch._fused_adamw_(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [step] * len(params),  # the kernel reads it and leaves counting to its caller
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def _use_fused_adam() -> None:
    """Make Megatron-core use `FusedAdam` where neither Transformer Engine nor apex is installed."""
    if importlib.util.find_spec("transformer_engine") or importlib.util.find_spec("apex"):
        return
    import megatron.core.optimizer as mcore_optimizer
    from megatron.core.optimizer import distrib_optimizer

    mcore_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    # Named after where FusedAdam comes from; what they select is its layout of state.
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = True


_NUMBERED = {"forward-compute": "forward", "backward-compute": "backward"}
_ALL = "forward-backward"  # begins the micro-batches anew
_NOTHING_NS = 50_000  # a step that this layout does not have, but for its calls
LANE = "megatron"


class MegatronSpans:
    """Replaces Megatron's class `Timers`, of which `config.timers(name, log_level)` gives one to start and stop.

    On a GPU the calls come when a kernel is launched, so each is marked by an event in the GPU's stream as well;
    `settle` turns these into times where the GPU has just been waited for.
    """

    def __init__(self, make_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        """`make_event`: on a GPU, an event that takes times."""
        self._make_event = make_event
        self.timers: dict[str, _Timer] = {}
        self.marked: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Return the timer of a name; all levels are recorded."""
        return self.timers.setdefault(name, _Timer(self, name))

    def settle(self) -> None:
        """Turn the events so far into spans; on a GPU, waits for it. To be called where it has been waited for."""
        if self._make_event is None or not self.marked:
            return
        end = self._make_event()
        end.record()
        end.synchronize()
        now, marked, self.marked = time.monotonic_ns(), self.marked, []
        for name, number, begun, ended in marked:
            _note(name, number, now - int(1e6 * begun.elapsed_time(end)), now - int(1e6 * ended.elapsed_time(end)))

    def now(self) -> int | torch.cuda.Event:
        """Return the time, or on a GPU an event that marks it."""
        if self._make_event is None:
            return time.monotonic_ns()
        event = self._make_event()
        event.record()
        return event


@dataclass
class _Timer:
    """Spans of one name. Its methods never wait at a barrier, which would cost time."""

    spans: MegatronSpans
    name: str
    begun: int | torch.cuda.Event | None = None
    number: int = 0

    def start(self, barrier: bool = False) -> None:
        """Begin a span."""
        if recorder() is None:
            return
        if self.name == _ALL:
            for timer in self.spans.timers.values():
                timer.number = 0
        self.begun = self.spans.now()

    def stop(self, barrier: bool = False) -> None:
        """End it."""
        begun, self.begun = self.begun, None
        if begun is None:
            return
        number, self.number, now = self.number, self.number + 1, self.spans.now()
        if not isinstance(begun, int) and not isinstance(now, int):
            self.spans.marked.append((self.name, number, begun, now))
            return
        assert isinstance(begun, int) and isinstance(now, int)
        if self.name in _NUMBERED or self.name == _ALL or now - begun >= _NOTHING_NS:
            _note(self.name, number, begun, now)


def _note(name: str, number: int, start_ns: int, end_ns: int) -> None:
    if name in _NUMBERED:
        note(_NUMBERED[name], start_ns, end_ns, LANE, micro_batch=number)
    else:
        note(name, start_ns, end_ns, LANE)


def record_megatron(trained: Trained, device: torch.device) -> MegatronSpans:
    """Let Megatron's timers of a model and its optimizer be recorded."""
    spans = MegatronSpans(partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None)
    for config in (trained.transformer, *(inner.config for inner in trained.optimizer.chained_optimizers)):
        config.timers = spans
    return spans


def settle(trained: Trained) -> None:
    """See `MegatronSpans.settle`; nothing to do where they are not recorded."""
    spans = trained.transformer.timers
    if isinstance(spans, MegatronSpans):
        spans.settle()
