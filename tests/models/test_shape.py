"""The model's shape from config.json: as transformers sees it, and what a malformed one is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from fusionrl.models.shape import read_model_shape, shape_from_hf_config

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
LLAMA |= {"num_attention_heads": 4, "vocab_size": 100}


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
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias is not supported for llama"),
        ({"use_sliding_window": True}, "sliding-window"),
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
