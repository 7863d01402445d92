"""The model's shape, read from the config.json of a Hugging Face folder: no launch script repeats it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fusionrl.base.spelling import hint
from fusionrl.models import families
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.yarn import check_yarn


class MoEShape(BaseModel):
    """A mixture of experts.

    layers                  the layers that have one; the others have a dense MLP
    norm_topk_prob          the chosen experts' weights sum to `scaling_factor`
    expert_bias             a bias of the choice alone (DeepSeek-V3); no gradient reaches it
    num_groups, group_topk  experts are chosen from the best `group_topk` of `num_groups` groups
    shared_ffn_hidden_size  width of the expert that every token passes; 0: there is none
    """

    model_config = ConfigDict(frozen=True)

    num_experts: int = Field(gt=0)
    topk: int = Field(gt=0)
    ffn_hidden_size: int = Field(gt=0)
    layers: tuple[int, ...]
    norm_topk_prob: bool
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias: bool = False
    scaling_factor: float = 1.0
    num_groups: int = Field(default=1, gt=0)
    group_topk: int = Field(default=1, gt=0)
    shared_ffn_hidden_size: int = Field(default=0, ge=0)
    shared_gate: bool = False


class MLAShape(BaseModel):
    """Multi-head latent attention: ranks of the compressed queries (None: not compressed) and keys and values."""

    model_config = ConfigDict(frozen=True)

    q_lora_rank: int | None = Field(default=None, gt=0)
    kv_lora_rank: int = Field(gt=0)
    qk_head_dim: int = Field(gt=0)
    qk_pos_emb_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)


class ModelShape(BaseModel):
    """Sizes of a decoder, under Hugging Face's names where it has one.

    head_dim            of queries and keys
    rope_scaling        as config.json has it
    rotary_percent      share of a head's dimensions that is rotated
    rotary_interleaved  pairs of neighbours are rotated, not halves
    output_norms        norms also after attention and after the MLP (GLM-4)
    value_head          a value for each position in place of logits: a critic
    """

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
    attention_bias: bool = False
    qk_layernorm: bool = False
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    output_norms: bool = False
    value_head: bool = False
    moe: MoEShape | None = None
    mla: MLAShape | None = None

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def with_value_head(self) -> ModelShape:
        """The same decoder as a critic; its embedding has no output layer to be tied to."""
        return self.model_copy(update={"value_head": True, "tie_word_embeddings": False})

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer has experts in place of the dense MLP."""
        return self.moe is not None and layer in self.moe.layers

    @property
    def has_dense_mlp(self) -> bool:
        """Return whether some layer has a dense MLP."""
        return self.moe is None or len(self.moe.layers) < self.num_layers

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has some; 0: the model has none."""
        return self.moe.num_experts if self.moe else 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, embeddings counted once when they are tied."""
        return sum(rule.numel for rule in families.model_rules(self).values() if not rule.buffer)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes: of the experts, those that a token is routed to."""
        rules = [rule for rule in families.model_rules(self).values() if not rule.buffer]
        routed = sum(rule.numel for rule in rules if rule.expert is not None)
        share = self.moe.topk / self.moe.num_experts if self.moe else 0.0
        return sum(rule.numel for rule in rules) - routed + round(routed * share)


def shape_difference(path: str | Path, saved: Mapping[str, Any], shape: ModelShape) -> str | None:
    """Compare `saved`, the shape in the description of the checkpoint at `path`, with the model's.

    Returns:
        A message with both values of the first field that differs; None where all are equal.

    Raises:
        KeyError, TypeError, ValueError: another version wrote `saved`.
    """
    before = ModelShape(**saved).model_dump()
    for name, value in shape.model_dump().items():
        if before[name] != value:
            return (
                f"checkpoint {path}: its model has {name} {before[name]!r}, --hf-checkpoint "
                f"has {value!r}; give the model that the run was started with"
            )
    return None


def read_model_shape(folder: str | Path, flag: str = "--hf-checkpoint") -> ModelShape:
    """Read the shape from `folder`/config.json."""
    return shape_from_hf_config(read_hf_config(folder, flag), f"{flag} {folder}")


def read_hf_config(folder: str | Path, flag: str) -> dict[str, Any]:
    """`folder`/config.json."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        meant = hint(Path(folder), Path.is_dir) or "; give a Hugging Face model folder"
        raise ValueError(f"{flag} {folder}: there is no such folder{meant}")
    if not path.is_file():
        raise ValueError(f"{flag} {folder}: it has no config.json; give a Hugging Face model folder")
    return read_json_object(path, f"{flag} {folder}: config.json")


def read_json_object(file: Path, subject: str) -> dict[str, Any]:
    """Read a file that has a JSON object. `subject`: how messages name it."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{subject} is not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{subject} is not a JSON object")
    return raw


def shape_from_hf_config(raw: HfConfig, where: str = "config.json") -> ModelShape:
    """The shape of a parsed config.json (both transformers 4's and 5's way of writing RoPE)."""
    try:
        family = families.get_family(raw.get("model_type", ""))
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is silu")
        if raw.get("use_sliding_window"):
            raise ValueError("sliding-window attention is not supported")
        fields = family.read(raw)
        if isinstance(moe := fields.get("moe"), dict) and not moe["layers"]:
            del fields["moe"]  # every layer is one of the dense ones
        _check_rope(fields, family.model_type)
    except KeyError as error:
        raise ValueError(f"{where}: config.json lacks {error.args[0]!r}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: config.json has {_sizes(raw)}") from error
    try:
        return ModelShape(model_type=family.model_type, **fields)
    except ValidationError as error:
        raise ValueError(f"{where}: config.json has {_sizes(raw)}") from error


def _check_rope(fields: Mapping[str, Any], model_type: str) -> None:
    scaling = fields["rope_scaling"]
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(f"rope_scaling is {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type")) if scaling else "default"
    takes_yarn = "mla" in fields or model_type.startswith("qwen")
    known = ("default", *["yarn"] * takes_yarn, *["llama3"] * ("mla" not in fields))
    if scaling and kind == "yarn" and takes_yarn and "mla" not in fields:
        check_yarn(scaling, fields.get("rotary_percent", 1.0))
    if kind not in known:
        raise ValueError(f"rope_scaling {scaling} is not supported; supported are {' and '.join(known)}")


def _sizes(raw: Mapping[str, object]) -> str:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = ", ".join(f"{name} {raw.get(name)!r}" for name in names)
    return f"a size that is not a positive number ({sizes})"
