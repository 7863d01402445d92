"""Compare the model shape in a launch script's Megatron-LM flags with config.json. Pure."""

import ast
import json
import re
from collections.abc import Callable, Mapping

from fusionrl.models.shape import ModelShape

# The value of the flag that would be right, by a model's shape; None: the flag says nothing of such a model.
_Right = Callable[[ModelShape], "bool | int | float | str | list[int] | tuple[int, int] | None"]


def _scaling(name: str, default: float) -> _Right:
    return lambda shape: float((shape.rope_scaling or {}).get(name, default))


def _field(name: str, default: bool | int | float | None = None) -> _Right:
    """Read a field of TransformerConfig that kinds of layers set, or `default` where none does."""
    return lambda shape: shape.kind_fields.get(name) or default  # type: ignore[return-value]


def _is_latent(shape: ModelShape) -> bool:
    return "multi_latent_attention" in shape.kind_fields


def _unless_latent(name: str) -> _Right:
    """A field of the shape that latent attention has in a way of its own."""
    return lambda shape: None if _is_latent(shape) else getattr(shape, name)


def _of_kind(name: str) -> _Right:
    """A size of the first kind of attention that has it."""
    return lambda shape: next((getattr(kind, name) for kind in shape.attention if hasattr(kind, name)), None)


def _attention_every(shape: ModelShape) -> int | None:
    """After how many layers the first comes that attends, where some do not."""
    attends = [kind.pair_flops(shape) > 0 for kind in shape.attention]
    return None if all(attends) else attends.index(True) + 1 if any(attends) else len(attends)


def _window(shape: ModelShape) -> tuple[int, int] | None:
    """Tokens up to one that it sees, and after it."""
    size = next((kind.window for kind in shape.attention if kind.window is not None), None)
    return None if size is None else (size, 0)


def _narrow_layers(shape: ModelShape) -> list[int] | None:
    narrow = [int(kind.window is not None) for kind in shape.attention]
    return narrow if any(narrow) else None


_OF_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
# Flags that are fields of TransformerConfig, with their values where no kind of layer sets them.
_FIELDS: dict[str, bool | int | float | None] = {
    **dict.fromkeys((*_OF_LATENT, "moe_router_score_function")),
    **dict.fromkeys(("attention_output_gate", "moe_shared_expert_gate", "moe_router_enable_expert_bias"), False),
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"), 0),
    **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"), 1),
    "moe_router_topk_scaling_factor": 1.0,
}
RIGHT_VALUES: dict[str, _Right] = {
    "num_layers": lambda s: s.num_layers,
    "hidden_size": lambda s: s.hidden_size,
    "ffn_hidden_size": lambda s: s.ffn_hidden_size if len(s.expert_layers) < s.num_layers else None,
    "num_attention_heads": lambda s: s.num_attention_heads,
    "group_query_attention": lambda s: s.num_query_groups < s.num_attention_heads,
    "num_query_groups": lambda s: s.num_query_groups,
    "kv_channels": _unless_latent("head_dim"),
    "normalization": lambda s: "RMSNorm",
    "norm_epsilon": lambda s: s.rms_norm_eps,
    "layernorm_epsilon": lambda s: s.rms_norm_eps,
    "swiglu": lambda s: s.activation in ("silu", "quick_gelu"),  # the latter is gpt-oss, gated as well
    "disable_bias_linear": lambda s: not _field("add_bias_linear", False)(s),
    "add_qkv_bias": _unless_latent("attention_bias"),
    "qk_layernorm": lambda s: _is_latent(s) or s.qk_layernorm,
    "untie_embeddings_and_output_weights": lambda s: not s.tie_word_embeddings,
    "post_self_attn_layernorm": lambda s: s.output_norms,
    "post_mlp_layernorm": lambda s: s.output_norms,
    "apply_layernorm_1p": lambda s: s.zero_centered_norms,
    "use_gated_attention": _field("attention_output_gate", False),
    "position_embedding_type": lambda s: "rope",
    "use_rotary_position_embeddings": lambda s: True,
    "no_position_embedding": lambda s: True,
    "rotary_base": lambda s: s.rope_theta,
    "rotary_percent": _unless_latent("rotary_percent"),
    "rotary_interleaved": _unless_latent("rotary_interleaved"),
    "use_rope_scaling": lambda s: bool(s.rope_scaling),
    "rope_scaling_factor": _scaling("factor", 1.0),
    "rotary_scaling_factor": _scaling("factor", 1.0),
    "mscale": lambda s: _scaling("mscale", 1.0)(s) if s.rope_scaling else None,
    "mscale_all_dim": lambda s: _scaling("mscale_all_dim", 1.0)(s) if s.rope_scaling else None,
    "multi_latent_attention": _is_latent,
    "window_size": _window,
    "window_attn_skip_freq": _narrow_layers,
    "softmax_type": lambda s: "learnable" if any(getattr(kind, "sinks", False) for kind in s.attention) else "vanilla",
    "linear_attention_freq": _attention_every,
    "linear_conv_kernel_dim": _of_kind("conv_size"),
    "linear_key_head_dim": _of_kind("key_dim"),
    "linear_value_head_dim": _of_kind("value_dim"),
    "linear_num_key_heads": _of_kind("key_heads"),
    "linear_num_value_heads": _of_kind("value_heads"),
    **{name: _field(name, default) for name, default in _FIELDS.items()},
    "num_experts": _field("num_moe_experts", 0),
    "moe_layer_freq": lambda s: [int(layer in s.expert_layers) for layer in range(s.num_layers)],
    "moe_router_pre_softmax": lambda s: (
        _field("moe_router_pre_softmax", False)(s) if _field("moe_router_score_function")(s) == "softmax" else None
    ),
}


def claim_errors(shape: ModelShape, claims: Mapping[str, object], where: str = "config.json") -> list[str]:
    """Compare what a launch script says of the shape with what it is; a line with both values for each difference.

    `claims`: flag name → its value as on the command line, True for a switch. Other flags than those of shapes are not
    looked at. `where` the shape comes from is for the message.
    """
    errors = []
    for name, value in claims.items():
        if name == "vocab_size":
            right: object = None if _is_vocabulary(claims, shape.vocab_size) else shape.vocab_size
        elif name in RIGHT_VALUES:
            right = RIGHT_VALUES[name](shape)
        else:
            continue
        has_none = name == "window_size" or (name in _OF_LATENT and not _is_latent(shape))
        if right is None and not has_none:
            continue
        if right is None or not _is_equal(name, value, right):
            flag = "--" + name.replace("_", "-")
            flag_text = flag if value is True else f"{flag} {value}"
            errors.append(
                f"{flag_text}: {where} has {_shown(name, right, value is True)}; leave the flag out, or give its model"
            )
    return errors


def _is_vocabulary(claims: Mapping[str, object], size: int) -> bool:
    """A script may give the tokenizer's own size, which is padded to the model's."""
    try:
        claimed = int(str(claims["vocab_size"]))
        divisor = int(str(claims.get("make_vocab_size_divisible_by", 128)))
    except ValueError:
        return False
    return claimed == size or (divisor > 0 and claimed < size <= -(-claimed // divisor) * divisor)


def _is_equal(name: str, value: object, right: bool | int | float | str | list[int] | object) -> bool:
    if isinstance(right, bool) or value is True:
        return value is True and bool(right)
    if isinstance(right, list):
        every, count = str(value), len(right)
        if name == "window_attn_skip_freq" and every.isdecimal() and int(every):  # each Nth sees all
            return right == [int((layer + 1) % int(every) != 0) for layer in range(count)]
        return layer_pattern(every, count) == right
    if isinstance(right, tuple):  # scripts give sliding_window, which counts the token itself, or one less
        return re.sub(r"[() ]", "", str(value)) in (f"{right[0]},0", f"{right[0] - 1},0")
    if isinstance(right, int | float):
        try:
            return abs(float(str(value)) - right) <= 1e-9 * abs(right)
        except ValueError:
            return False
    return str(value).lower() == str(right).lower()


def _shown(name: str, right: object, is_switch: bool) -> str:
    if is_switch:
        return "none of it"
    if right is None:
        return "no window" if name == "window_size" else "no latent attention"
    return json.dumps(right) if isinstance(right, list) else str(right)


def layer_pattern(text: str, num_layers: int) -> list[int] | None:
    """Return which layers have experts, as --moe-layer-freq says it: N (each Nth), [1, 0, …] or [0]*3+[1]*45."""
    try:
        value = _pattern(ast.parse(text.strip(" '\""), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    if isinstance(value, int):
        return [int(number % value == 0) for number in range(num_layers)] if value > 0 else None
    return value


def _pattern(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [_pattern(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _pattern(node.left), _pattern(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and right < 10_000:
            return left * right
    raise ValueError("no list of layers")
