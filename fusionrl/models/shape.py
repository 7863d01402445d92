"""The model's shape, read from the config.json of a Hugging Face folder: no launch script repeats it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError, model_validator

from fusionrl.base.wording import hint
from fusionrl.models import families
from fusionrl.models.hf_folder import text_config, vision_of
from fusionrl.models.kinds import Attention, Dense, Experts, Full, Kind, Latent, Mlp
from fusionrl.models.kinds.attention import check_yarn, is_yarn
from fusionrl.models.rules import HfConfig
from fusionrl.models.vision import VisionShape


def _of_its_class(value: object) -> object:
    """A kind out of what `model_dump` made of it, whichever class it is of; others as they are."""
    if not isinstance(value, Mapping):
        return value
    classes = {kind.model_fields["kind"].default: kind for kind in reversed([*Kind.classes()])}
    return classes[value["kind"]](**value)


def _of_its_tower(value: object) -> object:
    """A tower's shape out of what `model_dump` made of it; others as they are."""
    if not isinstance(value, Mapping):
        return value
    from fusionrl.models.families.vision import TOWERS

    return next(tower for tower in TOWERS if tower.model_fields["kind"].default == value["kind"])(**value)


_AnyAttention = Annotated[SerializeAsAny[Attention], BeforeValidator(_of_its_class)]
_AnyMlp = Annotated[SerializeAsAny[Mlp], BeforeValidator(_of_its_class)]
_AnyVision = Annotated[SerializeAsAny[VisionShape], BeforeValidator(_of_its_tower)]


class ModelShape(BaseModel):
    """Sizes of a decoder, under Hugging Face's names where it has one.

    attention, mlp      the kind of each layer; a single kind: that of all layers (`models/kinds`)
    head_dim            of queries and keys
    rope_scaling        as config.json has it
    rotary_percent      share of a head's dimensions that is rotated
    rotary_interleaved  pairs of neighbours are rotated, not halves
    width_norm          the norms of q and k are over all heads at once (OLMo 2)
    input_norms         norms before attention and before the MLP
    zero_centered_norms  norms multiply by 1 + weight (Gemma, Qwen3.5)
    output_norms        norms after attention and after the MLP (GLM-4)
    activation          of the gate of an MLP
    softmax_scale       of scores, where it is not that of head_dim
    embedding_scale     what embeddings are multiplied by; residual_scale: what attention and MLP give; logits_scale:
                        what logits are divided by (Granite)
    value_head          a value for each position in place of logits: a critic
    mtp_layers          layers of multi-token prediction that are trained with it
    vision              the tower of a model that sees; None: the text model alone
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
    width_norm: bool = False
    input_norms: bool = True
    zero_centered_norms: bool = False
    output_norms: bool = False
    activation: Literal["silu", "gelu_tanh", "quick_gelu"] = "silu"
    softmax_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    value_head: bool = False
    mtp_layers: int = 0
    vision: _AnyVision | None = None
    attention: tuple[_AnyAttention, ...]
    mlp: tuple[_AnyMlp, ...]

    @model_validator(mode="before")
    @classmethod
    def _fill_layers(cls, values: Mapping[str, object]) -> dict[str, object]:
        """One kind for all layers, or none; and `moe` and `mla` of shapes that earlier versions saved."""
        fields = dict(values)
        latent, mixture = fields.pop("mla", None), fields.pop("moe", None)
        count = fields.get("num_layers")
        count = count if isinstance(count, int) else 0
        if isinstance(latent, Mapping):
            fields["attention"] = Latent(**latent)
        if isinstance(mixture, Mapping):
            experts = Experts(**{name: value for name, value in mixture.items() if name != "layers"})
            fields["mlp"] = tuple(experts if layer in mixture["layers"] else Dense() for layer in range(count))
        for name, default in (("attention", Full()), ("mlp", Dense())):
            kind = fields.setdefault(name, default)
            if isinstance(kind, Kind):
                fields[name] = (kind,) * count
        return fields

    @model_validator(mode="after")
    def _check_layers(self) -> ModelShape:
        if not len(self.attention) == len(self.mlp) == self.num_layers:
            raise ValueError(f"kinds of {len(self.attention)} and {len(self.mlp)} of {self.num_layers} layers")
        if len({mlp for mlp in self.mlp if mlp.num_experts}) > 1:
            raise ValueError("layers with different mixtures; Megatron has one configuration for all")
        if len({kind.window for kind in self.attention} - {None}) > 1:
            raise ValueError("layers with windows of different sizes; Megatron has one configuration for all")
        if self.vision is not None:
            self.vision.check(self.hidden_size, round(self.head_dim * self.rotary_percent) // 2, self.num_layers)
        return self

    def __hash__(self) -> int:
        # Of a few fields: shapes are compared where these are equal.
        return hash((self.model_type, self.num_layers, self.hidden_size, self.vocab_size, self.value_head))

    def with_value_head(self) -> ModelShape:
        """The same decoder as a critic; its embedding has no output layer to be tied to."""
        return self.model_copy(update={"value_head": True, "tie_word_embeddings": False})

    def with_mtp(self, count: int) -> ModelShape:
        """The same decoder with `count` layers of multi-token prediction. Raises ValueError: its family has no such."""
        names = families.get_family(self.model_type).mtp
        if names is None:
            raise ValueError(f"--enable-mtp-training: a {self.model_type} model has no such layers here; leave it out")
        if count > names.most:
            raise ValueError(f"--mtp-num-layers {count}: a {self.model_type} model has at most {names.most}")
        return self.model_copy(update={"mtp_layers": count})

    @property
    def trunk(self) -> ModelShape:
        """The same decoder without them."""
        return self.model_copy(update={"mtp_layers": 0}) if self.mtp_layers else self

    @property
    def mtp_kinds(self) -> tuple[Attention, Mlp]:
        """The kinds of a layer of multi-token prediction: the decoder's last of those that attend to all tokens."""
        return next(kind for kind in reversed(self.attention) if kind.pair_flops(self)), self.mlp[-1]

    @property
    def longer(self) -> ModelShape:
        """A decoder that has these layers as further ones of its own."""
        if not self.mtp_layers:
            return self
        attention, mlp = self.mtp_kinds
        count = self.mtp_layers
        layers = {"attention": (*self.attention, *[attention] * count), "mlp": (*self.mlp, *[mlp] * count)}
        return self.model_copy(update=layers | {"num_layers": self.num_layers + count, "mtp_layers": 0})

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Each kind that some layer has, once: those of attention, then those of MLPs."""
        return (*dict.fromkeys(self.attention), *dict.fromkeys(self.mlp))

    @property
    def kind_fields(self) -> dict[str, object]:
        """Fields of TransformerConfig that the kinds add."""
        return {name: value for kind in self.kinds for name, value in kind.fields(self).items()}

    @property
    def may_share_prompts(self) -> bool:
        """Return whether siblings' prompts may be computed once: every kind says whether it can.

        A layer of multi-token prediction reads the token after a prompt at its last place: siblings differ there.
        """
        return not self.mtp_layers and all(kind.may_share_prompts for kind in set(self.attention))

    @property
    def logit_bound(self) -> float:
        """Largest difference of a logit to transformers in fp32 that rounding explains."""
        return max(kind.logit_bound for kind in set(self.attention))

    @property
    def mixture(self) -> Experts | None:
        """The mixture of the layers that have one; all have the same."""
        return next((mlp for mlp in self.mlp if isinstance(mlp, Experts)), None)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has some; 0: the model has none."""
        return max((mlp.num_experts for mlp in self.mlp), default=0)

    @property
    def dense_within(self) -> int | None:
        """Tokens of the longest sample that trainers attend to as every layer does; None: samples of any length."""
        return min((kind.dense_within for kind in self.attention if kind.dense_within is not None), default=None)

    @property
    def divides_experts(self) -> bool:
        """Return whether it has experts that expert tensor parallelism may divide."""
        return self.num_experts > 0 and not any(mlp.has_whole_experts for mlp in self.mlp)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer, mlp in enumerate(self.mlp) if mlp.num_experts)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, embeddings counted once when they are tied."""
        return sum(rule.numel for rule in families.model_rules(self).values() if not rule.buffer)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes: of the experts, those that a token is routed to; not the tower's."""
        rules = [rule for rule in families.model_rules(self).values() if not (rule.buffer or rule.is_vision)]
        routed = sum(rule.numel for rule in rules if rule.expert is not None)
        share = self.mixture.topk / self.num_experts if self.mixture else 0.0
        return sum(rule.numel for rule in rules) - routed + round(routed * share)


def shape_difference(path: str | Path, saved: Mapping[str, object], shape: ModelShape) -> str | None:
    """Return what differs first between `saved`, the shape in the checkpoint at `path`, and the model's; None: nothing.

    Raises KeyError, TypeError or ValueError where another version wrote `saved`.
    """
    name, before, now = next(differences(ModelShape.model_validate(saved), shape), ("", None, None))
    if name == "mtp_layers":
        return (
            f"checkpoint {path}: it has {before} layers of multi-token prediction, this run {now}; give"
            " --enable-mtp-training and --mtp-num-layers as the run was started with, or leave them out as there"
        )
    different = f"its model has {name} {before!r}, --hf-checkpoint has {now!r}"
    return f"checkpoint {path}: {different}; give the model that the run was started with" if name else None


def differences(first: ModelShape, second: ModelShape) -> Iterator[tuple[str, object, object]]:
    """(field, its value in the first, in the second) where they differ; of the kinds of layers the first that does."""
    ours, theirs = first.model_dump(), second.model_dump()
    for name in (name for name, value in ours.items() if theirs[name] != value):
        if name not in ("attention", "mlp"):
            yield name, ours[name], theirs[name]
        elif first.num_layers == second.num_layers:
            pairs = enumerate(zip(ours[name], theirs[name], strict=True))
            yield next((f"{name} of layer {layer}", *pair) for layer, pair in pairs if pair[0] != pair[1])


def read_model_shape(folder: str | Path, flag: str = "--hf-checkpoint", *, sees: bool = False) -> ModelShape:
    """Read the shape from `folder`/config.json; `sees`: with its vision tower (`config.eval_sets.sees_images`)."""
    return shape_from_hf_config(read_hf_config(folder, flag), f"{flag} {folder}", sees=sees)


def read_hf_config(folder: str | Path, flag: str) -> dict[str, Any]:
    """`folder`/config.json."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        meant = hint(Path(folder), Path.is_dir) or "; give a Hugging Face model folder"
        raise ValueError(f"{flag} {folder}: there is no such folder{meant}")
    if not path.is_file():
        raise ValueError(f"{flag} {folder}: it has no config.json; give a Hugging Face model folder")
    return read_json_object(path, f"{flag} {folder}: config.json")


def read_text_config(folder: str | Path, flag: str) -> HfConfig:
    """`folder`/config.json, as the text model's own folder would have it."""
    raw = read_hf_config(folder, flag)
    try:
        return text_config(raw)
    except ValueError as error:
        raise ValueError(f"{flag} {folder}: {error}") from error


def read_json_object(file: Path, subject: str) -> dict[str, Any]:
    """Read a file that has a JSON object. `subject`: how messages name it."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{subject} is not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{subject} is not a JSON object")
    return raw


def shape_from_hf_config(raw: HfConfig, where: str = "config.json", *, sees: bool = False) -> ModelShape:
    """The shape of a parsed config.json (both transformers 4's and 5's way of writing RoPE).

    sees  with the vision tower of a multimodal model; else it is the text part alone
    """
    try:
        whole, raw = raw, text_config(raw)
        family = families.get_family(raw.get("model_type", ""))
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is silu")
        if raw.get("use_sliding_window"):
            raise ValueError("use_sliding_window is not supported: SGLang ignores it, and would disagree with trainers")
        fields = family.read(family.filled(raw))
        scaling = fields["rope_scaling"]
        if scaling is not None and not isinstance(scaling, Mapping):
            raise TypeError(f"rope_scaling is {scaling!r}")
        if sees:
            fields["vision"] = vision_of(whole, raw)
        shape = ModelShape(model_type=family.model_type, **fields)
        _check_rope(shape)
    except KeyError as error:
        raise ValueError(f"{where}: config.json lacks {error.args[0]!r}") from error
    except ValidationError as error:
        reasons = [str(one["ctx"]["error"]) for one in error.errors() if one["type"] == "value_error"]
        raise ValueError(f"{where}: config.json has {'; '.join(reasons) or _sizes(raw)}") from error
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: config.json has {_sizes(raw)}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return shape


def _check_rope(shape: ModelShape) -> None:
    scaling = shape.rope_scaling
    if not scaling:
        return
    types = {name for kind in set(shape.attention) for name in kind.rope_types}
    if families.get_family(shape.model_type).yarn:
        types.add("yarn")
        if is_yarn(scaling):
            check_yarn(scaling, shape.rotary_percent)
    known = [name for name in ("default", "yarn", "llama3", "linear") if name in types]
    if scaling.get("rope_type", scaling.get("type")) not in known:
        raise ValueError(f"rope_scaling {scaling} is not supported; supported are {' and '.join(known)}")


def _sizes(raw: Mapping[str, object]) -> str:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = ", ".join(f"{name} {raw.get(name)!r}" for name in names)
    return f"a size that is not a positive number ({sizes})"
