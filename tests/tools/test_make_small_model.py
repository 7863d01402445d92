"""A small model of a large one's config.json: of the same family, read by fusionrl, with the large one's tokenizer."""

import json
from pathlib import Path

import pytest

from fusionrl.models.shape import read_model_shape
from tests.tiny_model import CHAT_TEMPLATE, make_byte_tokenizer
from tools.make_small_model import make

LARGE = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "vocab_size": 151936}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_a_small_model_of_the_family(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    large, out = tmp_path / "large", tmp_path / "small"
    make_byte_tokenizer().save_pretrained(large)
    config = AutoConfig.for_model(family, **LARGE, tie_word_embeddings=False, use_sliding_window=False)
    (large / "config.json").write_text(config.to_json_string(use_diff=False))
    assert make(large, out, num_layers=2) < 1e6
    shape = read_model_shape(out)
    assert (shape.model_type, shape.num_layers, shape.hidden_size, shape.vocab_size) == (family, 2, 64, 320)
    assert (shape.num_experts > 0) == (family in ("qwen3_moe", "glm4_moe", "deepseek_v3"))
    assert AutoTokenizer.from_pretrained(out).chat_template == CHAT_TEMPLATE
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
