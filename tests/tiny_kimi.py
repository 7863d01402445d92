"""A tiny Kimi-VL: transformers' Kimi-K2.5, whose tower treats a still image as Kimi-VL's does, under Kimi-VL's names.

transformers has no Kimi-VL, and permutes the heads of the tower for its own rotary embeddings. It takes an epsilon
of 1e-6 in the norms of the compressed parts of latent attention, whatever config.json says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PATCH = 14
_SIDE = 8
_NAMES = {  # of transformers → of Kimi-VL, in this order
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_tower.layers.": "vision_tower.encoder.blocks.",
    "model.vision_tower.final_layernorm.": "vision_tower.encoder.final_layernorm.",
    "model.vision_tower.": "vision_tower.",
    "patch_embed.pos_emb.position_embeddings": "patch_embed.pos_emb.weight",
    "model.mm_projector.pre_norm.": "multi_modal_projector.pre_norm.",
    "model.mm_projector.in_proj.": "multi_modal_projector.linear_1.",
    "model.mm_projector.out_proj.": "multi_modal_projector.linear_2.",
}
_OF_BLOCKS = {".norm1.": ".norm0.", ".norm2.": ".norm1.", ".mlp.fc1.": ".mlp.fc0.", ".mlp.fc2.": ".mlp.fc1."}
_OF_BLOCKS |= {".attn.proj.": ".wo."}


def config_of(
    image_token: int, hidden: int, layers: int, ffn: int, depth: int, tower: int, tower_ffn: int, tie: bool
) -> Any:
    """transformers' configuration; the first layer is dense, as Kimi-VL's is."""
    from transformers import AutoConfig

    text: dict[str, Any] = {"model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": hidden}
    text |= {"intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4}
    text |= {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    text |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 32}
    text |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
    text |= {"norm_topk_prob": True, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 8e5}}
    text |= {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": None, "tie_word_embeddings": tie}
    vision = {"hidden_size": tower, "intermediate_size": tower_ffn, "num_hidden_layers": depth}
    vision |= {"num_attention_heads": 2, "pos_emb_height": _SIDE, "pos_emb_width": _SIDE, "patch_size": PATCH}
    tokens = {"image_token_id": image_token, "video_token_id": 512}  # no text has it
    return AutoConfig.for_model(
        "kimi_k25",
        text_config=text,
        vision_config=vision,
        projection_hidden_size=tower,
        tie_word_embeddings=tie,
        **tokens,
    )


def published_config(config: Any) -> dict[str, Any]:
    """config.json as Kimi-VL's folders have it."""
    text, vision = config.text_config.to_dict(), config.vision_config
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "architectures": None, "moe_layer_freq": 1}
    text |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "media_placeholder_token_id": config.image_token_id,
        "ignore_index": -100,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "text_config": text,
        "vision_config": {
            "model_type": "moonvit",
            "patch_size": vision.patch_size,
            "num_attention_heads": vision.num_attention_heads,
            "num_hidden_layers": vision.num_hidden_layers,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "init_pos_emb_height": vision.pos_emb_height,
            "init_pos_emb_width": vision.pos_emb_width,
            "merge_kernel_size": list(vision.merge_kernel_size),
        },
    }


def save(model: torch.nn.Module, folder: str | Path) -> None:
    """Write config.json and the weights into this folder, which is made if missing."""
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(published_config(model.config), indent=2))
    tensors = {name: tensor.clone().contiguous() for name, tensor in published(model, model.state_dict()).items()}
    save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})


def published(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters, or their gradients, of transformers' model by Kimi-VL's names, one tensor for each expert."""
    import torch

    found: dict[str, torch.Tensor] = {}
    projections: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        name = _replaced(name, _NAMES)
        layer, _, part = name.partition(".experts.")
        if ".encoder.blocks." in name:
            name = _replaced(name, _OF_BLOCKS)
        head, _, kind = name.partition(".attn.")
        if kind and head.startswith("vision_tower."):
            projection, _, ending = kind.partition("_proj.")
            projections.setdefault(f"{head}.wqkv.{ending}", {})[projection] = tensor
        elif part:
            for expert, of_expert in enumerate(tensor):
                halves = zip(("gate", "up"), of_expert.chunk(2), strict=True)
                parts = dict(halves) if part == "gate_up_proj" else {"down": of_expert}
                found |= {f"{layer}.experts.{expert}.{own}_proj.weight": value for own, value in parts.items()}
        else:
            found[name] = tensor
    heads = model.config.vision_config.num_attention_heads
    for name, parts in projections.items():
        turned = (_neighbours(parts[projection], heads) for projection in "qk")
        found[name] = torch.cat([*turned, parts["v"]])
    return found


def text_names(named: Mapping[str, Any]) -> dict[str, Any]:
    """The same by the names that trainers have."""
    own = {"language_model.": "", "vision_tower.": "visual.", "multi_modal_projector.": "visual.merger."}
    return {_replaced(name, own): value for name, value in named.items()}


def _neighbours(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads whose halves are turned against each other → those whose neighbours are."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _replaced(name: str, names: Mapping[str, str]) -> str:
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name
