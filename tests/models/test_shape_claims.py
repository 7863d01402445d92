"""Shape flags of a launch script against the model's config.json."""

import pytest

from fusionrl.compat.slime.flags import SHAPES
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.models.shape_claims import RIGHT_VALUES, claim_errors, layer_pattern
from tests.models.test_families import shape_of

DENSE = {
    **{"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 128},
}
MOE = DENSE | {
    **{"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0], "tie_word_embeddings": False},
}
RIGHT = {
    **{"num_layers": "4", "hidden_size": "64", "ffn_hidden_size": "128", "num_attention_heads": "4", "swiglu": True},
    **{"group_query_attention": True, "num_query_groups": "2", "kv_channels": "16", "vocab_size": "1000"},
    **{"norm_epsilon": "1e-6", "normalization": "RMSNorm", "rotary_base": "1000000", "qk_layernorm": True},
    **{"disable_bias_linear": True, "use_rotary_position_embeddings": True, "position_embedding_type": "rope"},
    **{"rotary_percent": "1.0", "optimizer": "adam"},
}
OF_EXPERTS = RIGHT | {
    **{"num_experts": "8", "moe_router_topk": "2", "moe_ffn_hidden_size": "32", "moe_layer_freq": "[0]+[1]*3"},
    **{"untie_embeddings_and_output_weights": True, "moe_router_score_function": "softmax"},
}


def test_what_is_equal_is_accepted_in_silence() -> None:
    assert claim_errors(shape_from_hf_config(DENSE), RIGHT) == []
    assert claim_errors(shape_from_hf_config(MOE), OF_EXPERTS) == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("num_layers", "36", "--num-layers 36: config.json has 4;"),
        ("hidden_size", "x", "--hidden-size x: config.json has 64;"),
        ("norm_epsilon", "1e-5", "--norm-epsilon 1e-5: config.json has 1e-06;"),
        ("rotary_base", "10000", "--rotary-base 10000: config.json has 1000000.0;"),
        ("vocab_size", "1025", "--vocab-size 1025: config.json has 1000;"),
        ("add_qkv_bias", True, "--add-qkv-bias: config.json has none of it;"),
        ("untie_embeddings_and_output_weights", True, "config.json has none of it;"),
        ("attention_output_gate", True, "config.json has none of it;"),
        ("num_experts", "8", "--num-experts 8: config.json has 0;"),
        ("q_lora_rank", "8", "config.json has no latent attention;"),
        ("normalization", "LayerNorm", "config.json has RMSNorm;"),
        ("rotary_scaling_factor", "40", "config.json has 1.0;"),
        ("window_size", "128,0", "config.json has no window;"),
    ],
)
def test_what_differs_is_named_with_both_values(name: str, value: object, shown: str) -> None:
    (error,) = claim_errors(shape_from_hf_config(DENSE), RIGHT | {name: value})
    assert shown in error


def test_norms_around_zero_and_gates_are_those_of_the_model() -> None:
    claims = {"apply_layernorm_1p": True, "attention_output_gate": True, "use_gated_attention": True}
    assert claim_errors(shape_of("qwen3_next"), claims) == []
    assert len(claim_errors(shape_of("qwen3_moe"), claims)) == 3


def test_sizes_of_delta_nets_are_those_of_the_model() -> None:
    sizes = {"conv_kernel_dim": 4, "key_head_dim": 12, "value_head_dim": 8, "num_key_heads": 2, "num_value_heads": 4}
    claims = {f"linear_{name}": str(size) for name, size in sizes.items()} | {"linear_attention_freq": "2"}
    shape = shape_of("qwen3_5_text", layer_types=["linear_attention", "full_attention"])
    assert claim_errors(shape, claims) == []
    for name in claims:
        (error,) = claim_errors(shape, claims | {name: "3"})
        assert error.startswith(f"--{name.replace('_', '-')} 3: config.json has {claims[name]};")
    assert claim_errors(shape_of("qwen3"), claims) == []  # Megatron has values for them in each model


def test_windows_and_sinks_are_those_of_the_model() -> None:
    types = ["sliding_attention"] * 2 + ["full_attention"]
    shape = shape_of("gemma3_text", num_hidden_layers=3, layer_types=types, sliding_window=8)
    claims: dict[str, object] = {"window_size": "8,0", "window_attn_skip_freq": "3", "softmax_type": "vanilla"}
    assert claim_errors(shape, claims) == claim_errors(shape, claims | {"window_attn_skip_freq": "[1]*2+[0]"}) == []
    assert claim_errors(shape_of("gpt_oss"), {"softmax_type": "learnable", "window_size": "(7, 0)"}) == []
    for name, value in {"window_size": "9,0", "window_attn_skip_freq": "2", "softmax_type": "learnable"}.items():
        (error,) = claim_errors(shape, claims | {name: value})
        assert error.startswith(f"--{name.replace('_', '-')} {value}: config.json has ")


def test_a_vocabulary_may_be_given_before_its_padding() -> None:
    shape = shape_from_hf_config(DENSE | {"vocab_size": 1024})
    assert claim_errors(shape, {"vocab_size": "1000"}) == []
    assert claim_errors(shape, {"vocab_size": "800"}) and claim_errors(shape, {"vocab_size": "1025"})
    assert claim_errors(shape, {"vocab_size": "1000", "make_vocab_size_divisible_by": "16"})


def test_the_width_of_a_dense_mlp_counts_only_where_there_is_one() -> None:
    claims = {"ffn_hidden_size": "7", "moe_layer_freq": "1"}
    assert claim_errors(shape_from_hf_config(MOE | {"mlp_only_layers": []}), claims) == []
    assert len(claim_errors(shape_from_hf_config(MOE), claims)) == 2


def test_patterns_of_layers() -> None:
    wanted = {"1": [1, 1, 1, 1], "2": [1, 0, 1, 0], "[0, 1, 1]": [0, 1, 1], "([0]*1+[1]*1)*2": [0, 1, 0, 1]}
    wanted |= {"[0]*1+[1]*3": [0, 1, 1, 1]}
    assert {text: layer_pattern(text, 4) for text in wanted} == wanted
    assert all(layer_pattern(text, 4) is None for text in ("__import__('os')", "[0]*100000000", "0"))


def test_every_shape_flag_is_compared() -> None:
    assert {*RIGHT_VALUES, "vocab_size"} == {*SHAPES}
