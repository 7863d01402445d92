"""The model's shape, read from the config.json of a Hugging Face folder: no launch script repeats it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


class ModelShape(BaseModel):
    """Sizes of a decoder, under Hugging Face's names where it has one."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_type: str
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    ffn_hidden_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_query_groups: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None = None
    tie_word_embeddings: bool
    attention_bias: bool
    qk_layernorm: bool

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, embeddings counted once when they are tied."""
        h, d = self.hidden_size, self.head_dim
        qkv = h * d * (self.num_attention_heads + 2 * self.num_query_groups)
        bias = d * (self.num_attention_heads + 2 * self.num_query_groups) if self.attention_bias else 0
        attention = qkv + bias + self.num_attention_heads * d * h + (2 * d if self.qk_layernorm else 0)
        layer = attention + 3 * h * self.ffn_hidden_size + 2 * h
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + h


def read_model_shape(folder: str | Path, flag: str = "--hf-checkpoint") -> ModelShape:
    """Read the shape from `folder`/config.json.

    Raises:
        ValueError: no folder, no or malformed config.json, or a family that is not supported; names `flag`.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ValueError(f"{flag} {folder}: there is no such folder; give a Hugging Face model folder")
    if not path.is_file():
        raise ValueError(f"{flag} {folder}: it has no config.json; give a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {folder}: config.json is not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{flag} {folder}: config.json is no JSON object")
    return shape_from_hf_config(raw, f"{flag} {folder}")


def shape_from_hf_config(raw: dict, where: str = "config.json") -> ModelShape:
    """The shape of a parsed config.json (both transformers 4's and 5's way of writing RoPE).

    Raises:
        ValueError: family not supported, a size missing, or a feature that no trainer here computes.
    """
    family = raw.get("model_type")
    if family not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"{where}: model_type {family!r} is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    if scaling and scaling.get("rope_type", scaling.get("type")) not in ("default", "llama3"):
        raise ValueError(f"{where}: rope_scaling {scaling} is not supported; supported are default and llama3")
    if raw.get("mlp_bias"):
        raise ValueError(f"{where}: mlp_bias is not supported")
    if raw.get("attention_bias") and family != "qwen2":
        raise ValueError(f"{where}: attention_bias is not supported for {family}")
    if raw.get("use_sliding_window"):
        raise ValueError(f"{where}: sliding-window attention is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported; supported is silu")
    try:
        heads = raw["num_attention_heads"]
        return ModelShape(
            model_type=family,
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            ffn_hidden_size=raw["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab_size=raw["vocab_size"],
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
            rope_scaling=scaling,
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=family == "qwen2",
            qk_layernorm=family == "qwen3",
        )
    except KeyError as error:
        raise ValueError(f"{where}: config.json lacks {error.args[0]!r}") from error
    except (ValidationError, TypeError, ZeroDivisionError) as error:
        sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        shown = ", ".join(f"{name} {raw.get(name)!r}" for name in sizes)
        raise ValueError(f"{where}: config.json has a size that is no positive number ({shown})") from error
