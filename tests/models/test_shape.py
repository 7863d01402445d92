"""The model's shape from config.json: as transformers sees it, and what a malformed one is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from fusionrl.models.shape import read_model_shape, shape_from_hf_config
from tests.models.test_families import shape_of
from tests.trainer import hf_models

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
LLAMA |= {"num_attention_heads": 4, "vocab_size": 100}
DELTA = {name: value for name, value in hf_models.HYBRID.items() if name.startswith("linear_")}


def test_both_ways_of_writing_rope() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    old = shape_from_hf_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = shape_from_hf_config(LLAMA | {"rope_parameters": {"rope_theta": 5e5, **scaling}})
    assert old.rope_theta == new.rope_theta == 5e5
    assert old.rope_scaling and new.rope_scaling
    assert old.rope_scaling["factor"] == new.rope_scaling["factor"] == 8.0
    plain = shape_from_hf_config(LLAMA | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}})
    assert plain.rope_scaling is None


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are llama, qwen2, qwen3"),
        ({"model_type": "llama4_text"}, "model_type 'llama4_text' is not supported: it attends in chunks"),
        ({"model_type": "nemotron_h"}, "is not supported: its Mamba layers: Megatron-core's train no packed sequences"),
        ({"model_type": "granitemoehybrid"}, "its Mamba layers"),
        ({"model_type": "gemma2"}, "is not supported: it caps scores and logits"),
        ({"model_type": "gemma4_text"}, "its heads have two sizes"),
        ({"model_type": "cohere2"}, "log-probs of SGLang 0.5 and transformers differ by 0.2"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias is not supported for llama"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported: SGLang ignores it"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": "wide"}, "hidden_size 'wide'"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"vocab_size": -5}, "vocab_size -5"),
    ],
)
def test_what_cannot_be_trained_is_named(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match="here: ") as caught:
        shape_from_hf_config(LLAMA | change, "here")
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "change", "part"),
    [
        (
            "phi3",
            {"sliding_window": 64, "max_position_embeddings": 128},
            "sliding_window 64 is not supported for phi3: SGLang ignores it",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling"),
        ("olmo2", {"attention_bias": True}, "attention_bias is not supported for olmo2"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported for gemma3_text"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported for gemma3_text"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 2}, "layer_types chunked_attention are not supported"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window None is not supported for gemma3_text with layers"),
        ("olmo3", {"sliding_window": None}, "or layer_types of full_attention alone"),
        ("olmo3", {"rope_theta": 10000.0}, "rope_theta 10000.0 and 500000.0 are not supported for olmo3"),
        ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 2.0}}, "attention_factor"),
        ("olmo3", {"layer_types": ["full_attention"]}, "config.json has kinds of 1 and 2 of 2 layers"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias is not supported for smollm3"),
        ("granite", {"attention_bias": True}, "attention_bias is not supported for granite"),
        (
            "qwen3_5_text",
            DELTA | {"linear_num_key_heads": 3},
            "config.json has 4 value heads of delta nets, not a multiple",
        ),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate false is not supported for qwen3_5_text"),
        ("deepseek_v3", {"index_topk": 64}, "index_topk is not supported for deepseek_v3"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported"),
    ],
)
def test_what_a_family_has_not_is_named(model_type: str, change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match="here: ") as caught:
        shape_from_hf_config(LLAMA | {"model_type": model_type} | change, "here")
    assert part in str(caught.value)


def test_a_size_that_is_missing() -> None:
    for missing in [name for name in LLAMA if name != "model_type"]:
        with pytest.raises(ValueError, match=f"lacks '{missing}'"):
            shape_from_hf_config({name: value for name, value in LLAMA.items() if name != missing})


def test_files_that_are_no_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, part in ((None, "no config.json"), ("{", "not valid JSON"), ("[]", "not a JSON object")):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ValueError, match=f"--ref-load {tmp_path}.*{part}"):
            read_model_shape(tmp_path, "--ref-load")
    file.write_text(json.dumps(LLAMA))
    assert read_model_shape(tmp_path).num_parameters > 0
    with pytest.raises(ValueError, match="there is no such folder"):
        read_model_shape(tmp_path / "none")


def shape_or_message(raw: dict[str, Any]) -> object:
    try:
        return shape_from_hf_config(raw)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("family", [*hf_models.FAMILIES, *(name for name in hf_models.PLUGINS if name != "short_conv")])
def test_a_field_that_config_json_lacks_is_what_transformers_takes(family: str) -> None:
    """Whichever field of a whole config.json is left out: it is named, or the shape is that of transformers' class."""
    config = hf_models.config_of(family, False)
    whole = config.to_dict() | {"model_type": family}
    lacking = [{name: value for name, value in whole.items() if name != left_out} for left_out in whole]
    if "full_attention" not in whole["rope_parameters"]:
        lacking.append(whole | {"rope_parameters": {"rope_type": "default"}})
    for raw in lacking:
        shape = shape_or_message(raw)
        if "config.json lacks" not in str(shape) and "model_type" in raw:
            assert shape == shape_or_message(type(config)(**raw).to_dict() | {"model_type": family})


def test_layers_without_windows_need_no_size() -> None:
    full = {"layer_types": ["full_attention"] * 2}
    for family in ("gemma3_text", "olmo3"):
        config = LLAMA | {"model_type": family} | full
        assert shape_from_hf_config(config | {"sliding_window": None}) == shape_from_hf_config(config)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_yarn_is_refused_where_a_part_of_a_head_is_rotated(family: str) -> None:
    raw = hf_models.config_of(family, False).to_dict()
    raw["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(ValueError, match="is not supported; supported are default and llama3 and linear"):
        shape_from_hf_config(raw)


def test_the_narrowest_layer_limits_the_length_of_samples() -> None:
    """Whichever layer it is."""
    shape = shape_of("deepseek_v3")
    first, last = shape.attention
    assert shape.dense_within is None
    narrow = shape.model_copy(update={"attention": (first, last.model_copy(update={"index_topk": 9}))})
    assert narrow.dense_within == 9
