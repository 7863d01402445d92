"""What models of SGLang need on a CPU alone, put into their modules when these are imported.

A model without such a part pays nothing. The functions replace Triton kernels, which no CPU runs, and choices that
SGLang makes by the name of an attention backend it knows.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusionrl.base.cpu_wing import ATTENTION_BACKEND, PROCESSOR_VARIABLE
from fusionrl.base.imports import when_imported
from fusionrl.cpu import delta_rule


def add_gated(hidden: Tensor, gate: Tensor, shared: Tensor, out: Tensor) -> None:
    """Add the shared expert's `shared` [T, h] to `out` [T, h], each token by its own weight: sigmoid(hidden · gate)."""
    weights = (hidden.float() @ gate.float()).sigmoid()
    out += (shared.float() * weights[:, None]).to(out.dtype)


def squares_of_rows(query: Tensor, key: Tensor) -> Tensor:
    """Sums of squares over the heads of this rank, [2, T] fp32."""
    return torch.stack([rows.float().pow(2).sum(-1) for rows in (query, key)])


def norm_rows(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, squares: Tensor, num_ranks: int, eps: float
) -> tuple[Tensor, ...]:
    """RMSNorm of queries and of keys over all heads of all ranks; `squares` are the sums of `squares_of_rows`."""

    def norm(rows: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
        scale = torch.rsqrt(sums / (rows.size(-1) * num_ranks) + eps)
        return (rows.float() * scale[:, None] * weight.float()).to(rows.dtype)

    return norm(query, query_weight, squares[0]), norm(key, key_weight, squares[1])


def _absorb(handlers: ModuleType) -> None:
    """Let latent attention be computed on the latent vectors, whatever the batch.

    Triton's way, which SGLang takes for names that it does not know, builds keys and values of prompts by a kernel.
    """
    for name in (ATTENTION_BACKEND, "torch_native"):
        handlers.AttentionBackendRegistry.register(name, lambda attention, batch: handlers.AttnForwardMethod.MLA)


def _rotate_plainly(factory: ModuleType) -> None:
    """Let latent attention have rotary embeddings without YaRN, which SGLang asserts on a CPU."""
    original = factory.get_rope_cpu

    def get_rope_cpu(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        is_neox_style: bool,
        rope_scaling: dict[str, object] | None,
        dtype: torch.dtype | None,
        partial_rotary_factor: float,
        device: str | None,
    ) -> torch.nn.Module:
        arguments = head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor
        is_yarn = bool(rope_scaling) and rope_scaling.get("rope_type") == "deepseek_yarn"  # type: ignore[union-attr]
        module: torch.nn.Module = original(*arguments, device) if is_yarn else factory.get_rope(*arguments)
        return module

    vars(factory)["get_rope_cpu"] = get_rope_cpu


def _take_our_backend(checks: ModuleType) -> None:
    """Let models that need windows and sinks take our attention as they take that of Intel's kernels: it has both."""
    original = checks.attention_backends_of

    def attention_backends_of(config: object) -> tuple[str | None, ...]:
        return tuple("intel_amx" if name == ATTENTION_BACKEND else name for name in original(config))

    vars(checks)["attention_backends_of"] = attention_backends_of


def _change_gpt_oss(model: ModuleType) -> None:
    """Give sinks the type of the model's other weights (SGLang makes them bf16), and load biases from copies.

    Ranks but the first set a bias to 0, in the tensor that they are given: it is in memory that the engines of a push
    share (`engines/weight_payload.py`).
    """
    original_init, original = model.GptOssAttention.__init__, model.GptOssForCausalLM.load_weights

    def init(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        original_init(self, *args, **kwargs)
        self.sinks = torch.nn.Parameter(self.sinks.to(torch.get_default_dtype()), requires_grad=False)

    def load_weights(
        self: torch.nn.Module, weights: Iterable[tuple[str, Tensor]], *args: object, **kwargs: object
    ) -> object:
        own = ((name, tensor.clone() if name.endswith("down_proj_bias") else tensor) for name, tensor in weights)
        return original(self, own, *args, **kwargs)

    model.GptOssForCausalLM.load_weights = load_weights
    model.GptOssAttention.__init__ = init


PROCESSORS = "sglang.srt.multimodal.processors"
"""SGLang's package with a module for each kind of processor."""
_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


class ImagesAlone:
    """transformers' processor of a model type, but for videos, as far as SGLang's table of processors asks.

    Qwen's processors have a part for videos, which needs torchvision. Its builds fit one build of torch each, and the
    registries have none for torch's CPU build. Images need no part of it: transformers cuts them with PIL.
    """

    def __init__(self, model_type: str) -> None:
        self._model_type = model_type

    def from_pretrained(self, *args: object, **kwargs: object) -> object:
        """Load the processor of a folder; the whole one where torchvision is installed."""
        import transformers
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
        from transformers.utils import is_torchvision_available  # `importlib` would find our stand-in

        processor: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[self._model_type])
        if not is_torchvision_available():
            processor = _without_videos(processor)
        return processor.from_pretrained(*args, **kwargs)


def _without_videos(whole: type) -> type:
    """A subclass whose `__init__` names no part for videos: transformers loads the parts that it names."""

    def __init__(
        self: object,
        image_processor: object = None,
        tokenizer: object = None,
        chat_template: str | None = None,
        **kwargs: object,
    ) -> None:
        whole.__init__(self, image_processor, tokenizer, chat_template=chat_template, **kwargs)  # type: ignore[misc]

    return type(whole.__name__, (whole,), {"__init__": __init__})


def _add_to_table(module: ModuleType) -> None:
    for model_type in _MODEL_TYPES:
        module._CUSTOMIZED_MM_PROCESSOR.setdefault(model_type, ImagesAlone(model_type))


def _import_one(module: ModuleType) -> None:
    """Let SGLang look for processors in the one module that the environment names: all 55 take 1 s of a core."""

    def iter_modules(path: object, prefix: str = "") -> Iterator[pkgutil.ModuleInfo]:
        wanted = os.environ.get(PROCESSOR_VARIABLE) if prefix == f"{PROCESSORS}." else None
        for info in pkgutil.iter_modules(path, prefix):  # type: ignore[arg-type]
            if not wanted or info.name == prefix + wanted:
                yield info

    vars(module)["pkgutil"] = SimpleNamespace(iter_modules=iter_modules)


def _replace(**functions: object) -> Callable[[ModuleType], None]:
    """Build a change that gives a module these in place of its own. AttributeError if it has none of that name."""

    def change(module: ModuleType) -> None:
        for name, function in functions.items():
            getattr(module, name)
            setattr(module, name, function)

    return change


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "srt.models.deepseek_common.attention_backend_handler": _absorb,
    "srt.layers.rotary_embedding.factory": _rotate_plainly,
    "srt.models.qwen2_moe": _replace(fused_gate_sigmoid_mul_add=add_gated),
    "srt.models.minimax_m2": _replace(rms_sumsq_serial=squares_of_rows, rms_apply_serial=norm_rows),
    "srt.models.gpt_oss": _change_gpt_oss,
    "srt.arg_groups.model_hook": _take_our_backend,
    # They ask for `fused_rmsnorm_gated_cpu` only where a CPU has AMX.
    "kernels.ops.attention.fla.layernorm_gated": _replace(_use_cpu=True),
    "kernels.ops.attention.fla.fused_norm_gate": _replace(_use_cpu=True),
    "srt.multimodal.customized_mm_processor_utils": _add_to_table,
    "srt.managers.multimodal_processor": _import_one,
}
"""Module of SGLang → what changes it."""


def register() -> None:
    """Change the modules that this process and its forks have imported, and those that they will; call it once."""
    delta_rule.register()
    for name, change in _CHANGES.items():
        when_imported(f"sglang.{name}", change)
