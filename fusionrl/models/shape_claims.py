"""Compare the model shape in a launch script's Megatron-LM flags with config.json. Pure."""

import ast
import json
from collections.abc import Callable, Mapping

from fusionrl.models.shape import ModelShape

# The value of the flag that would be right, by a model's shape; None: the flag says nothing of such a model.
_Right = Callable[[ModelShape], "bool | int | float | str | list[int] | None"]


def _scaling(name: str, default: float) -> _Right:
    return lambda shape: float((shape.rope_scaling or {}).get(name, default))


def _of_mla(name: str) -> _Right:
    return lambda shape: None if shape.mla is None else getattr(shape.mla, name)


def _of_moe(name: str) -> _Right:
    return lambda shape: 0 if shape.moe is None else getattr(shape.moe, name)


RIGHT_VALUES: dict[str, _Right] = {
    "num_layers": lambda s: s.num_layers,
    "hidden_size": lambda s: s.hidden_size,
    "ffn_hidden_size": lambda s: s.ffn_hidden_size if s.has_dense_mlp else None,
    "num_attention_heads": lambda s: s.num_attention_heads,
    "group_query_attention": lambda s: s.num_query_groups < s.num_attention_heads,
    "num_query_groups": lambda s: s.num_query_groups,
    "kv_channels": lambda s: None if s.mla is not None else s.head_dim,
    "normalization": lambda s: "RMSNorm",
    "norm_epsilon": lambda s: s.rms_norm_eps,
    "layernorm_epsilon": lambda s: s.rms_norm_eps,
    "swiglu": lambda s: True,
    "disable_bias_linear": lambda s: True,
    "add_qkv_bias": lambda s: None if s.mla is not None else s.attention_bias,
    "qk_layernorm": lambda s: True if s.mla is not None else s.qk_layernorm,
    "untie_embeddings_and_output_weights": lambda s: not s.tie_word_embeddings,
    "post_self_attn_layernorm": lambda s: s.output_norms,
    "post_mlp_layernorm": lambda s: s.output_norms,
    "apply_layernorm_1p": lambda s: False,
    "attention_output_gate": lambda s: False,
    "use_gated_attention": lambda s: False,
    "position_embedding_type": lambda s: "rope",
    "use_rotary_position_embeddings": lambda s: True,
    "no_position_embedding": lambda s: True,
    "rotary_base": lambda s: s.rope_theta,
    "rotary_percent": lambda s: None if s.mla is not None else s.rotary_percent,
    "rotary_interleaved": lambda s: None if s.mla is not None else s.rotary_interleaved,
    "use_rope_scaling": lambda s: bool(s.rope_scaling),
    "rope_scaling_factor": _scaling("factor", 1.0),
    "rotary_scaling_factor": _scaling("factor", 1.0),
    "mscale": lambda s: _scaling("mscale", 1.0)(s) if s.rope_scaling else None,
    "mscale_all_dim": lambda s: _scaling("mscale_all_dim", 1.0)(s) if s.rope_scaling else None,
    "multi_latent_attention": lambda s: s.mla is not None,
    "q_lora_rank": _of_mla("q_lora_rank"),
    "kv_lora_rank": _of_mla("kv_lora_rank"),
    "qk_head_dim": _of_mla("qk_head_dim"),
    "qk_pos_emb_head_dim": _of_mla("qk_pos_emb_head_dim"),
    "v_head_dim": _of_mla("v_head_dim"),
    "num_experts": _of_moe("num_experts"),
    "moe_layer_freq": lambda s: [int(s.has_experts(layer)) for layer in range(s.num_layers)],
    "moe_ffn_hidden_size": _of_moe("ffn_hidden_size"),
    "moe_router_topk": _of_moe("topk"),
    "moe_shared_expert_intermediate_size": _of_moe("shared_ffn_hidden_size"),
    "moe_shared_expert_gate": lambda s: s.moe is not None and s.moe.shared_gate,
    "moe_router_score_function": lambda s: s.moe.score_function if s.moe is not None else None,
    "moe_router_pre_softmax": lambda s: (
        None if s.moe is None or s.moe.score_function == "sigmoid" else not s.moe.norm_topk_prob
    ),
    "moe_router_enable_expert_bias": lambda s: s.moe is not None and s.moe.expert_bias,
    "moe_router_num_groups": lambda s: 1 if s.moe is None else s.moe.num_groups,
    "moe_router_group_topk": lambda s: 1 if s.moe is None else s.moe.group_topk,
    "moe_router_topk_scaling_factor": lambda s: 1.0 if s.moe is None else s.moe.scaling_factor,
}
_OF_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


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
        if right is None and not (name in _OF_LATENT and shape.mla is None):
            continue
        if right is None or not _is_equal(value, right):
            flag = "--" + name.replace("_", "-")
            flag_text = flag if value is True else f"{flag} {value}"
            errors.append(
                f"{flag_text}: {where} has {_shown(right, value is True)}; leave the flag out, or give its model"
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


def _is_equal(value: object, right: bool | int | float | str | list[int] | object) -> bool:
    if isinstance(right, bool) or value is True:
        return value is True and bool(right)
    if isinstance(right, list):
        return layer_pattern(str(value), len(right)) == right
    if isinstance(right, int | float):
        try:
            return abs(float(str(value)) - right) <= 1e-9 * abs(right)
        except ValueError:
            return False
    return str(value).lower() == str(right).lower()


def _shown(right: object, is_switch: bool) -> str:
    if is_switch:
        return "none of it"
    return json.dumps(right) if isinstance(right, list) else "no latent attention" if right is None else str(right)


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
