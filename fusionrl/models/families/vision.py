"""Families that see: their text parts are those of other families; the towers, and a reader of each.

In a run without images such a model is its text part alone, which has plain rotary embeddings. Kimi-VL's text part is
DeepSeek-V3 itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from fusionrl.models.families import llama, mixtures
from fusionrl.models.rules import Family, HfConfig, Published, Sizes
from fusionrl.models.vision import VisionShape

_PLAIN = ("default", "mrope")


def _linear(name: str, out: int, inputs: int) -> Iterator[tuple[str, Sizes]]:
    yield f"{name}.weight", (out, inputs)
    yield f"{name}.bias", (out,)


class WindowTower(VisionShape):
    """Qwen2.5-VL's: most blocks attend within windows."""

    kept_hidden, kept_ffn = 12, 4
    engine_rows = ("mlp.gate_proj", "mlp.up_proj", "merger.mlp.0")
    engine_columns = ("attn.proj", "mlp.down_proj", "merger.mlp.2")
    engine_joined: ClassVar[Mapping[str, tuple[str, ...]]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
    engine_multiple = 8

    kind: Literal["qwen2_5_vl"] = "qwen2_5_vl"
    window_size: int = Field(gt=0)  # pixels of a window's side
    full_layers: tuple[int, ...]  # blocks that attend to the whole image

    @property
    def window(self) -> tuple[int, int]:
        """All but `full_layers`."""
        return self.num_layers - len(self.full_layers), (self.window_size // self.patch_size) ** 2

    def tensors(self) -> Iterator[tuple[str, Sizes]]:
        """RMSNorm, and a gated MLP with biases."""
        h, f, joined = self.hidden_size, self.ffn_hidden_size, self.hidden_size * self.merge**2
        yield "patch_embed.proj.weight", (h, *self.kernel)
        for number in range(self.num_layers):
            block = f"blocks.{number}"
            yield f"{block}.norm1.weight", (h,)
            yield f"{block}.norm2.weight", (h,)
            yield from _linear(f"{block}.attn.qkv", 3 * h, h)
            yield from _linear(f"{block}.attn.proj", h, h)
            yield from _linear(f"{block}.mlp.gate_proj", f, h)
            yield from _linear(f"{block}.mlp.up_proj", f, h)
            yield from _linear(f"{block}.mlp.down_proj", h, f)
        yield "merger.ln_q.weight", (h,)
        yield from _linear("merger.mlp.0", joined, joined)
        yield from _linear("merger.mlp.2", self.out_hidden_size, joined)


class DeepstackTower(VisionShape):
    """Qwen3-VL's and Qwen3.5's: a table of positions, and features of inner blocks for the decoder's first layers."""

    kept_hidden, kept_ffn = 10, 2
    engine_rows = ("linear_fc1",)
    engine_columns = ("attn.proj", "linear_fc2")

    kind: Literal["qwen3_vl"] = "qwen3_vl"
    num_positions: int = Field(gt=0)  # rows of the table, a square that is stretched to each image
    deepstack_layers: tuple[int, ...] = ()  # see `deepstack`

    @property
    def deepstack(self) -> tuple[int, ...]:
        """As config.json lists them."""
        return self.deepstack_layers

    @property
    def table(self) -> tuple[int, int]:
        """Rows and columns of the table of positions."""
        side = round(self.num_positions**0.5)
        return side, side

    def tensors(self) -> Iterator[tuple[str, Sizes]]:
        """LayerNorm, and an MLP of two layers."""
        h, f, joined = self.hidden_size, self.ffn_hidden_size, self.hidden_size * self.merge**2
        yield "patch_embed.proj.weight", (h, *self.kernel)
        yield "patch_embed.proj.bias", (h,)
        yield "pos_embed.weight", (self.num_positions, h)
        for number in range(self.num_layers):
            block = f"blocks.{number}"
            for norm in ("norm1", "norm2"):
                yield f"{block}.{norm}.weight", (h,)
                yield f"{block}.{norm}.bias", (h,)
            yield from _linear(f"{block}.attn.qkv", 3 * h, h)
            yield from _linear(f"{block}.attn.proj", h, h)
            yield from _linear(f"{block}.mlp.linear_fc1", f, h)
            yield from _linear(f"{block}.mlp.linear_fc2", h, f)
        mergers = {"merger": h} | {f"deepstack_merger_list.{number}": joined for number in range(len(self.deepstack))}
        for merger, normed in mergers.items():
            yield f"{merger}.norm.weight", (normed,)
            yield f"{merger}.norm.bias", (normed,)
            yield from _linear(f"{merger}.linear_fc1", joined, joined)
            yield from _linear(f"{merger}.linear_fc2", self.out_hidden_size, joined)


class MoonTower(DeepstackTower):
    """Kimi-VL's MoonViT (arXiv:2504.07491): as Qwen3-VL's, but that neighbours in a head are turned against each other,
    and a norm after the last block.
    """

    engine_rows = ("mlp.fc0",)
    engine_columns = ("wo", "mlp.fc1")
    engine_modules: ClassVar[Mapping[str, str]] = {".wqkv.": ".attn.qkv_proj.", ".wo.": ".attn.proj."}
    engine_counts_layers = True
    epsilon = 1e-5

    kind: Literal["moonvit"] = "moonvit"  # type: ignore[assignment]
    position_table: tuple[int, int]  # rows and columns of the table of positions

    @property
    def table(self) -> tuple[int, int]:
        """It need not be a square."""
        return self.position_table

    def tensors(self) -> Iterator[tuple[str, Sizes]]:
        """As Qwen3-VL's, and the last norm."""
        for name, sizes in super().tensors():
            yield name, (*self.table, *sizes[1:]) if name == "pos_embed.weight" else sizes
        yield "final_norm.weight", (self.hidden_size,)
        yield "final_norm.bias", (self.hidden_size,)

    def stored(self, name: str) -> str:
        """Kimi-VL's names; the merger is its projector."""
        for ours, theirs in _MOON_NAMES.items():
            name = name.replace(ours, theirs)
        return name


_MOON_NAMES = {  # in this order
    "blocks.": "encoder.blocks.",
    "final_norm.": "encoder.final_layernorm.",
    "pos_embed.": "patch_embed.pos_emb.",
    ".norm1.": ".norm0.",
    ".norm2.": ".norm1.",
    ".attn.qkv.": ".wqkv.",
    ".attn.proj.": ".wo.",
    ".mlp.linear_fc1.": ".mlp.fc0.",
    ".mlp.linear_fc2.": ".mlp.fc1.",
    "merger.norm.": "merger.pre_norm.",
    ".linear_fc": ".linear_",
}


TOWERS: tuple[type[VisionShape], ...] = (WindowTower, DeepstackTower, MoonTower)


def _plain(raw: HfConfig) -> HfConfig:
    """config.json without mRoPE, which is plain RoPE for text alone."""
    return {**raw, "rope_scaling": None} if _rope_type(raw.get("rope_scaling") or {}) in _PLAIN else raw


def _rope_type(rope: HfConfig) -> str:
    name: str = rope.get("rope_type", rope.get("type", "default"))
    return name


def _tower(raw: HfConfig, text: HfConfig, token: int, usual: HfConfig) -> HfConfig:
    """Fields that Qwen's towers have, of config.json of the whole model and its `text` part.

    `token` is the placeholder's id if config.json does not say, `usual` what transformers takes for missing sizes.
    """
    vision = {**usual, **raw["vision_config"]}
    rope: HfConfig = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if _rope_type(rope) not in _PLAIN:
        raise ValueError(f"rope type {_rope_type(rope)!r} is not supported together with images")
    if vision["hidden_act"] != usual["hidden_act"]:
        raise ValueError(f"hidden_act {vision['hidden_act']!r} of the vision_config is not supported")
    return {
        "num_layers": vision["depth"],
        "hidden_size": vision["hidden_size"],
        "ffn_hidden_size": vision["intermediate_size"],
        "num_heads": vision["num_heads"],
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "channels": vision.get("in_channels", vision.get("in_chans", 3)),
        "merge": vision["spatial_merge_size"],
        "out_hidden_size": vision["out_hidden_size"],
        "image_token": raw.get("image_token_id", token),
        "mrope_section": tuple(rope["mrope_section"]),
        "mrope_interleaved": rope.get("mrope_interleaved", False),
    }


_QWEN_TOKEN = 151655
_COMMON: dict[str, Any] = {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16, "out_hidden_size": 3584}
_WINDOWS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "patch_size": 14,
    "hidden_act": "silu",
}
_WINDOWS |= {"window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31)}
_STACKED: dict[str, Any] = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
_STACKED |= {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304}


def read_windows(raw: HfConfig, text: HfConfig) -> VisionShape:
    """Qwen2.5-VL's tower."""
    vision = {**_WINDOWS, **raw["vision_config"]}
    return WindowTower(
        **_tower(raw, text, _QWEN_TOKEN, _COMMON | _WINDOWS),
        window_size=vision["window_size"],
        full_layers=tuple(vision["fullatt_block_indexes"]),
    )


def read_stacked(
    raw: HfConfig,
    text: HfConfig,
    token: int = _QWEN_TOKEN,
    deepstack: tuple[int, ...] = (8, 16, 24),
) -> VisionShape:
    """Qwen3-VL's tower; `deepstack`: its layers if config.json does not say."""
    vision = {**_STACKED, **raw["vision_config"]}
    shape = DeepstackTower(
        **_tower(raw, text, token, _COMMON | _STACKED),
        num_positions=vision["num_position_embeddings"],
        deepstack_layers=tuple(vision.get("deepstack_visual_indexes", deepstack)),
    )
    if not shape.mrope_interleaved:  # transformers' classes do not read it, and engines go by it
        raise ValueError("this model's axes are always interleaved: mrope_interleaved must be true in rope_parameters")
    return shape


def read_moon(raw: HfConfig, text: HfConfig) -> VisionShape:
    """Kimi-VL's tower; the defaults are those of the checkpoint's own code."""
    vision: Mapping[str, Any] = {**_MOON, **raw["vision_config"]}
    merge, other = vision["merge_kernel_size"]
    if merge != other:
        raise ValueError(f"merge_kernel_size {vision['merge_kernel_size']!r} of the vision_config is not a square")
    return MoonTower(
        num_layers=vision["num_hidden_layers"],
        hidden_size=vision["hidden_size"],
        ffn_hidden_size=vision["intermediate_size"],
        num_heads=vision["num_attention_heads"],
        patch_size=vision["patch_size"],
        temporal_patch_size=1,
        channels=3,
        merge=merge,
        out_hidden_size=text["hidden_size"],
        image_token=raw.get("media_placeholder_token_id", 163605),
        mrope_section=None,
        num_positions=vision["init_pos_emb_height"] * vision["init_pos_emb_width"],
        position_table=(vision["init_pos_emb_height"], vision["init_pos_emb_width"]),
    )


_MOON: dict[str, Any] = {"patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64}
_MOON |= {"num_attention_heads": 16, "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304}
_MOON |= {"merge_kernel_size": (2, 2)}


def _read(text: Callable[[HfConfig], dict[str, object]], raw: HfConfig) -> dict[str, object]:
    return text(_plain(raw))


_OTHERS = r"visual\..*"
_PACKED = {"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)}


def _seeing(text: Family, form: Published, defaults: Mapping[str, object]) -> Family:
    """A family with the text part of another one, which `form` is published in."""
    name, read = f"{form.model_type}_text", partial(_read, text.read)
    return replace(text, model_type=name, read=read, ignored=_OTHERS, yarn=False, published=form, defaults=defaults)


_TEXTS = {family.model_type: family for family in (*llama.FAMILIES, *mixtures.FAMILIES)}
_QWEN2_5 = {"num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN3 = {"num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 5e5}
_QWEN3_MOE = _QWEN3 | {"num_key_value_heads": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
_QWEN3_MOE |= {"norm_topk_prob": True}
_MIXED = Published("qwen3_vl_moe", _OTHERS, packed=_PACKED, may_turn=True, vision=read_stacked)
_KIMI = Published(
    "kimi_vl",
    _OTHERS,
    "DeepseekV3ForCausalLM",
    prefixes={"language_model.": "", "multi_modal_projector.": "visual.merger.", "vision_tower.": "visual."},
    vision=read_moon,
)
_DEEPSEEK = _TEXTS["deepseek_v3"]
FAMILIES = (
    replace(_DEEPSEEK, ignored=f"{_DEEPSEEK.ignored}|{_OTHERS}", published=_KIMI),  # in place of that without a tower
    _seeing(_TEXTS["qwen2"], Published("qwen2_5_vl", _OTHERS, vision=read_windows, boxes_in_pixels=True), _QWEN2_5),
    _seeing(_TEXTS["qwen3"], Published("qwen3_vl", _OTHERS, vision=read_stacked), _QWEN3),
    _seeing(_TEXTS["qwen3_moe"], _MIXED, _QWEN3_MOE),
)
