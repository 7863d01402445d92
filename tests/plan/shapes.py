"""Models that several tests plan for, as their config.json has them."""

from typing import Any

SMALL: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
