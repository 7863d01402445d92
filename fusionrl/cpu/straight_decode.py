"""Decode steps of plain transformers as a straight line of kernels, put into SGLang's models on a CPU from outside.

In each layer of each step SGLang decides by which of many paths it is computed, which on a CPU takes as long as the
arithmetic of a small model. A model whose layers are all of the plain kinds here is decided about once, when its engine
starts. The kernels are those of `sglang_layers.py` and `attention_backend.py` in the same order, so results are the
same bit by bit. SGLang still computes prompts, drafts, and models of other classes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from fusionrl.base.cpu_wing import ATTENTION_BACKEND
from fusionrl.cpu import kernels

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_SOURCE = "sglang.srt.models."
_MODELS = {
    "llama.LlamaModel": ("llama.LlamaDecoderLayer", "llama.LlamaAttention", "llama.LlamaMLP"),
    "qwen2.Qwen2Model": ("qwen2.Qwen2DecoderLayer", "qwen2.Qwen2Attention", "qwen2.Qwen2MLP"),
    "qwen3.Qwen3Model": ("qwen3.Qwen3DecoderLayer", "qwen3.Qwen3Attention", "qwen2.Qwen2MLP"),
}
"""SGLang's model classes → those of their layers, attention and MLP. Subclasses compute something else."""
_OFF = (
    *("enable_lora", "speculative_algorithm", "rl_on_policy_target", "enable_torch_compile"),
    *("debug_tensor_dump_output_folder", "forward_hooks"),
)
"""Arguments of a server that change what the layers do, or watch them."""

Parameters = dict[str, Any]


class _NotPlain(Exception):
    """The model needs SGLang's own path; the text says why."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parameters of one layer, by their modules: an update of the weights may put others in their place."""

    input_norm: Parameters
    input_eps: float
    qkv: Parameters
    head_norms: tuple[Parameters, Parameters] | None
    head_eps: float
    angles: torch.nn.Module
    number: int
    scale: float
    window: int | None
    out: Parameters
    mlp_norm: Parameters
    mlp_eps: float
    gate_up: Parameters
    down: Parameters


def install(runner: ModelRunner, backend: TorchNativeAttnBackend) -> bool:
    """Let a runner's model take the straight line if it is plain; return and log whether it is."""
    try:
        line = _Line(runner, backend)
    except _NotPlain as reason:
        logger.info("Decode steps: by SGLang's layers (%s)", reason)
        return False
    line.model.forward = line.forward
    logger.info("Decode steps: a straight line of kernels")
    return True


class _Line:
    def __init__(self, runner: ModelRunner, backend: TorchNativeAttnBackend) -> None:
        """Look through the model. Raises _NotPlain if something in it is computed otherwise."""
        if not kernels.loaded():
            raise _NotPlain("there are no kernels")
        causal_model = getattr(runner, "model", None)
        self.model: Any
        self.model = getattr(causal_model, "model", None)
        if causal_model is None or _name_of(self.model) not in _MODELS:
            raise _NotPlain(f"the model is a {_class_of(self.model if self.model is not None else causal_model)}")
        if getattr(runner, "decode_attention_backend_str", ATTENTION_BACKEND) != ATTENTION_BACKEND:
            raise _NotPlain(f"its attention is by {runner.decode_attention_backend_str}")
        options = [name for name in _OFF if getattr(runner.server_args, name, None)]
        sizes = [getattr(runner.server_args, name, 1) for name in ("tp_size", "pp_size", "dp_size")]
        if options or sizes != [1, 1, 1]:
            raise _NotPlain(f"the engine has {options[0] if options else 'several ranks'}")
        if any(module._forward_hooks or module._forward_pre_hooks for module in causal_model.modules()):
            raise _NotPlain("somebody watches its layers")
        self._usual = self.model.forward
        self._backend = backend
        self._plain_pool: object = None  # that was looked through
        self._layers = [_layer_of(layer, self.model) for layer in self.model.layers]
        self._norm, self._eps = _norm_of(self.model.norm)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: object = None,
    ) -> object:
        """Hidden states [tokens, h] after the last norm, as the model's own `forward` returns them."""
        if input_embeds is not None or pp_proxy_tensors is not None or not self._is_ours(positions, forward_batch):
            return self._usual(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        pool, table = self._backend.token_to_kv_pool, self._backend.req_to_token_pool.req_to_token
        rows, lengths, slots = forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.out_cache_loc
        hidden: Tensor = self.model.embed_tokens(input_ids)
        linear = functional.linear
        residual: Tensor | None = None
        for layer in self._layers:
            weight = layer.input_norm["weight"]
            if residual is None:
                inputs, residual = kernels.rms_norm(hidden, weight, layer.input_eps)[0], hidden
            else:
                inputs, residual = kernels.add_rms_norm(hidden, residual, weight, layer.input_eps)
            norms = layer.head_norms
            attended = kernels.attend_new(
                linear(inputs, layer.qkv["weight"], layer.qkv.get("bias")),
                None if norms is None else (norms[0]["weight"], norms[1]["weight"]),
                layer.head_eps,
                layer.angles.cos_sin_cache,
                positions,
                slots,
                pool.k_buffer[layer.number],
                pool.v_buffer[layer.number],
                table,
                rows,
                lengths,
                scale=layer.scale,
                window=layer.window,
            )
            hidden = linear(attended, layer.out["weight"], layer.out.get("bias"))
            inputs, residual = kernels.add_rms_norm(hidden, residual, layer.mlp_norm["weight"], layer.mlp_eps)
            gated = kernels.swiglu(linear(inputs, layer.gate_up["weight"]))
            hidden = linear(gated, layer.down["weight"])
        assert residual is not None, "a model has layers"
        return kernels.add_rms_norm(hidden, residual, self._norm["weight"], self._eps)[0]

    def _is_ours(self, positions: Tensor, batch: ForwardBatch) -> bool:
        if not batch.forward_mode.is_decode() or batch.spec_info is not None or batch.encoder_lens is not None:
            return False
        pool, table = self._backend.token_to_kv_pool, self._backend.req_to_token_pool.req_to_token
        numbers = positions, batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc
        count = positions.numel()
        if table.dtype is not torch.int32 or self.model.layers_to_capture or not count:
            return False
        if pool is not self._plain_pool:
            if not _is_plain_pool(pool):
                return False
            self._plain_pool = pool
        for tensor in numbers:
            if tensor.dtype is not torch.int64 or tensor.dim() != 1 or tensor.numel() != count:
                return False
        if torch.is_grad_enabled() or not all(tensor.is_contiguous() for tensor in (*numbers, table)):
            return False
        first, keys = self._layers[0], pool.k_buffer[0]
        return kernels.fit(first.qkv["weight"], first.angles.cos_sin_cache, keys, first.input_norm["weight"])


def _is_plain_pool(pool: Any) -> bool:
    """Return whether the pool stores keys and values token after token, in the type in which they are computed."""
    if _class_of(pool) != "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool" or pool.store_dtype != pool.dtype:
        return False
    is_other = getattr(pool, "is_quantized_kv_cache", False) or getattr(pool, "use_hnd", False)
    for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True):
        if keys.dim() != 3 or keys.shape != values.shape or not (keys.is_contiguous() and values.is_contiguous()):
            return False
    return not is_other and pool.start_layer == 0 and getattr(pool, "layer_transfer_counter", None) is None


def _layer_of(layer: Any, model: Any) -> _Layer:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    classes = tuple(map(_name_of, (layer, attention, mlp)))
    if classes != _MODELS[_name_of(model)]:
        raise _NotPlain(f"a layer is of {', '.join(classes)}")
    if _class_of(mlp.act_fn) != "sglang.srt.layers.activation.SiluAndMul":
        raise _NotPlain(f"the activation is {_class_of(mlp.act_fn)}")
    radix, rope, size = attention.attn, attention.rotary_emb, attention.head_dim
    if getattr(radix, "logit_cap", 0) or radix.qk_head_dim != radix.v_head_dim or radix.is_cross_attention:
        raise _NotPlain("the attention is of another kind")
    kind = type(rope)
    is_usual = isinstance(rope, RotaryEmbedding) and kind.forward_native is RotaryEmbedding.forward_native
    is_usual = is_usual and kind.forward is RotaryEmbedding.forward and rope.is_neox_style
    if not is_usual or hasattr(rope, "sin_cos_cache") or rope.head_size != size:
        raise _NotPlain(f"rotary embeddings are by {_class_of(rope)}")
    if not rope.cos_sin_cache.is_contiguous():
        raise _NotPlain("the table of angles has gaps")
    head_norms, head_eps = None, 0.0
    if hasattr(attention, "q_norm"):
        (query_norm, head_eps), (key_norm, key_eps) = _norm_of(attention.q_norm), _norm_of(attention.k_norm)
        if head_eps != key_eps:
            raise _NotPlain("queries and keys are normed differently")
        head_norms = query_norm, key_norm
    window = radix.sliding_window_size
    (input_norm, input_eps), (mlp_norm, mlp_eps) = map(
        _norm_of, (layer.input_layernorm, layer.post_attention_layernorm)
    )
    gate_up, down = _linear_of(mlp.gate_up_proj), _linear_of(mlp.down_proj)
    if gate_up.get("bias") is not None or down.get("bias") is not None:
        raise _NotPlain("its MLP has a bias")
    return _Layer(
        input_norm=input_norm,
        input_eps=input_eps,
        qkv=_linear_of(attention.qkv_proj),
        head_norms=head_norms,
        head_eps=head_eps,
        angles=rope,
        number=radix.layer_id,
        scale=radix.scaling,
        window=window if window is not None and window > -1 else None,
        out=_linear_of(attention.o_proj),
        mlp_norm=mlp_norm,
        mlp_eps=mlp_eps,
        gate_up=gate_up,
        down=down,
    )


def _linear_of(module: Any) -> Parameters:
    """The parameters of a projection that is a product with a dense matrix, and no more."""
    method = _class_of(getattr(module, "quant_method", None))
    if method != "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod" or module.skip_bias_add:
        raise _NotPlain(f"a projection is computed by {method}")
    if getattr(module, "use_intel_amx_backend", False):
        raise _NotPlain("a projection has its weights in another order")
    return module._parameters


def _norm_of(module: Any) -> tuple[Parameters, float]:
    is_plain = _class_of(module) == "sglang.srt.layers.layernorm.RMSNorm" and module.variance_size_override is None
    if not is_plain or module.cast_x_before_out_mul or module.fp32_residual:
        raise _NotPlain(f"a norm is a {_class_of(module)} of another kind")
    if getattr(module, "override_orig_dtype", None) not in (None, module.weight.dtype):
        raise _NotPlain("a norm gives another type")
    return module._parameters, module.variance_epsilon


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _name_of(value: object) -> str:
    """The class of a part of a model, by its name below SGLang's models."""
    return _class_of(value).removeprefix(_SOURCE)
