"""Tiny random models that see, as folders of Hugging Face, and transformers' numbers of them to compare with.

Their tokens are the bytes (0-255), those of `tests/tiny_model.py`, and four of vision. SGLang sets limits to what is
tiny: Qwen2.5-VL has patches of 14 x 14 x 2 x 3 numbers, Qwen3-VL-MoE three layers of deepstack and an epsilon of 1e-6.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests import tiny_kimi
from tests.tiny_model import SPECIAL_TOKENS, make_byte_tokenizer

if TYPE_CHECKING:
    import torch

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
KIMI = "kimi_vl"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, VIDEO = range(256 + len(SPECIAL_TOKENS), 256 + len(SPECIAL_TOKENS) + 4)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' or 'image' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def make_processor(path: str | Path, kind: str) -> None:
    """Write tokenizer, template and the image processor's numbers of this kind."""
    tokenizer = make_byte_tokenizer(more=tuple(spelled(token, kind) for token in VISION_TOKENS))
    tokenizer.chat_template = template = spelled(CHAT_TEMPLATE, kind)
    tokenizer.save_pretrained(path)
    Path(path, "preprocessor_config.json").write_text(json.dumps(image_numbers(kind), indent=2))
    Path(path, "chat_template.jinja").write_text(template)


def make_tiny_vlm(path: str | Path, kind: str, seed: int = 0, **sizes: Any) -> torch.nn.Module:
    """Write a float32 model of this kind, with tokenizer, template and image processor; return transformers' own.

    sizes  of `config_of`
    """
    import torch
    from transformers import AutoModelForImageTextToText

    config = config_of(kind, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter.normal_(std=0.5)  # routers that choose clearly, so that rounding changes no choice
                elif name.endswith(("A_log", "dt_bias")):  # transformers' own make some gates too small
                    parameter.copy_(torch.rand_like(parameter) - 0.5)
                elif parameter.dim() > 1:
                    parameter.mul_(3.0)  # away from the uniform distribution, so that a wrong weight shows
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))  # norms and biases
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.1)
    if kind == KIMI:
        tiny_kimi.save(model, path)
    else:
        model.save_pretrained(path)
    if kind == "qwen3_vl_moe":
        turn_experts(path)
    make_processor(path, kind)
    return model


def spelled(text: str, kind: str) -> str:
    """Text in which this kind's placeholder stands."""
    return text.replace("image_pad", "media_pad") if kind == KIMI else text


def patch_of(kind: str) -> int:
    """Pixels of a patch's side."""
    return 14 if kind in ("qwen2_5_vl", KIMI) else 16


def config_of(
    kind: str,
    *,
    hidden: int = 64,
    layers: int | None = None,
    ffn: int = 128,
    depth: int | None = None,
    tower: int = 32,
    tower_ffn: int | None = None,
    tie: bool = False,
) -> Any:
    """transformers' configuration: 4 heads, 2 KV heads; `tower` is the width of the tower, `depth` its layers."""
    from transformers import AutoConfig

    if kind == KIMI:
        return tiny_kimi.config_of(IMAGE, hidden, layers or 2, ffn, depth or 2, tower, tower_ffn or 2 * tower, tie)
    is_second, is_mixture, is_hybrid = kind == "qwen2_5_vl", kind.endswith("_moe"), kind in HYBRIDS
    layers = layers or (4 if is_hybrid else 3 if is_mixture else 2)
    depth = depth or (3 if is_mixture else 2)
    lanes = hidden // 4 // (4 if is_hybrid else 2)  # pairs of dimensions of a head that are turned
    side = 3 * lanes // 8 if is_second else lanes // 4
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [lanes - 2 * side, side, side]}
    rope |= {"rope_theta": 1e6} if is_second else {"rope_theta": 5e6, "mrope_interleaved": True}
    text: dict[str, Any] = {"vocab_size": 512, "hidden_size": hidden, "intermediate_size": ffn}
    text |= {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 2048, "rope_parameters": rope, "tie_word_embeddings": tie}
    text |= {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256, "rms_norm_eps": 1e-6}
    vision: dict[str, Any] = {"depth": depth, "hidden_size": tower, "intermediate_size": tower_ffn or 2 * tower}
    vision |= {"num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden}
    if is_second:
        vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [depth - 1]}
    else:
        text["head_dim"] = hidden // 4
        deepstack = [0, 1, 2] if is_mixture else [*range(min(2, depth, layers))]
        deepstack = [] if is_hybrid else deepstack
        vision |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": deepstack}
    if is_hybrid:
        rope["partial_rotary_factor"] = 0.5
        text |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 8}
        text |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "shared_expert_intermediate_size": 48}
        text["layer_types"] = ["full_attention" if layer % 2 else "linear_attention" for layer in range(layers)]
    if is_mixture:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    tokens |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=tie, **tokens)


def raw_config(kind: str, **sizes: Any) -> dict[str, Any]:
    """config.json of a folder; `sizes` of `config_of`."""
    config = config_of(kind, **sizes)
    whole: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return tiny_kimi.published_config(config) if kind == KIMI else whole


def image_numbers(kind: str) -> dict[str, Any]:
    """preprocessor_config.json, with the published models' means and names of limits; up to 64 tokens an image."""
    patch = patch_of(kind)
    least = (2 * patch) ** 2
    if kind == KIMI:
        numbers: dict[str, Any] = {"patch_size": patch, "in_token_limit": 256, "pad_input": True}
        return numbers | {"merge_kernel_size": [2, 2], "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    numbers = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, "temporal_patch_size": 2}
    numbers |= {"patch_size": patch}
    if kind == "qwen2_5_vl":
        numbers |= {"processor_class": "Qwen2_5_VLProcessor", "min_pixels": least, "max_pixels": 64 * least}
        numbers |= {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
        return numbers | {"image_std": [0.26862954, 0.26130258, 0.27577711]}
    numbers |= {"processor_class": "Qwen3VLProcessor", "size": {"shortest_edge": least, "longest_edge": 64 * least}}
    return numbers | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def turn_experts(folder: str | Path) -> None:
    """Turn a layer's experts in a folder of Qwen3-VL-MoE: published ones have inputs before outputs, [E, in, out].

    transformers saves the other way what it made itself, and reads both.
    """
    from safetensors.torch import load_file, save_file

    file = Path(folder, "model.safetensors")
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(_EXPERTS) else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def random_image(seed: int, width: int = 4, height: int = 4, *, patch: int = 16) -> np.ndarray:
    """[h, w, 3] uint8 of so many patches: noise, as no resize shall change it unseen."""
    return np.random.default_rng(seed).integers(0, 256, (height * patch, width * patch, 3), np.uint8)


class Reference:
    """transformers' model of a folder; ids are expanded (a placeholder for each token of an image)."""

    def __init__(self, folder: str | Path, model: torch.nn.Module | None = None) -> None:
        """`model`: what `make_tiny_vlm` returned, else it is read."""
        if model is None:
            import torch
            from transformers import AutoModelForImageTextToText

            model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.model = model
        self.numbers: dict[str, Any] = json.loads(Path(folder, "preprocessor_config.json").read_text())
        self.patch: int = self.numbers["patch_size"]
        self.is_kimi = "in_token_limit" in self.numbers

    def patches(self, image: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """(pixels [patches, 3 * 2 * patch ** 2] fp32, grid (1, h, w)) of an image [h, w, 3] uint8 in the normal form.

        Patches of a merged one follow one another; each holds its channels twice, for two frames that are equal.
        Kimi-VL's come row by row, [patches, 3, patch, patch], and have one frame.
        """
        size = self.patch
        means, stds = (np.array(self.numbers[name], np.float32) for name in ("image_mean", "image_std"))
        x = ((image.astype(np.float32) * np.float32(1 / 255) - means) / stds).transpose(2, 0, 1)
        height, width = x.shape[1] // size, x.shape[2] // size
        if self.is_kimi:
            x = x.reshape(3, height, size, width, size).transpose(1, 3, 0, 2, 4)
            return np.ascontiguousarray(x.reshape(-1, 3, size, size)), (1, height, width)
        x = x.reshape(3, height // 2, 2, size, width // 2, 2, size).transpose(1, 4, 2, 5, 0, 3, 6)
        x = np.broadcast_to(x[:, :, :, :, :, None], (*x.shape[:5], 2, size, size))
        return np.ascontiguousarray(x.reshape(height * width, -1)), (1, height, width)

    def num_tokens(self, image: np.ndarray) -> int:
        """Tokens of an image."""
        return image.shape[0] * image.shape[1] // (2 * self.patch) ** 2

    def expand(self, ids: Sequence[int], images: Sequence[np.ndarray]) -> list[int]:
        """Repeat the placeholders of `ids`, one for each image, as often as the images have tokens."""
        left = iter(images)
        return [token for i in ids for token in [i] * (self.num_tokens(next(left)) if i == IMAGE else 1)]

    def inputs(self, ids: Sequence[int], images: Sequence[np.ndarray] = ()) -> dict[str, Any]:
        """What `model` takes, a batch of one."""
        import torch

        row = torch.tensor([ids])
        found: dict[str, Any] = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        if images:
            pixels, grids = zip(*[self.patches(image) for image in images], strict=True)
            found |= {"pixel_values": torch.from_numpy(np.concatenate(pixels)), "image_grid_thw": torch.tensor(grids)}
            if not self.is_kimi:
                found["mm_token_type_ids"] = (row == IMAGE).int()
        return found

    def features(self, images: Sequence[np.ndarray]) -> tuple[list[torch.Tensor], np.ndarray]:
        """([features of all images, those of each layer of deepstack], their pixels)."""
        import torch

        pixels, grids = zip(*[self.patches(image) for image in images], strict=True)
        values, where = torch.from_numpy(np.concatenate(pixels)), torch.tensor(grids)
        if self.is_kimi:
            return [torch.cat(self.model.model.get_image_features(values, where).pooler_output)], values.numpy()
        whole = self.model.model.visual(values, where)
        return [whole.pooler_output, *getattr(whole, "deepstack_features", [])], values.numpy()

    def pushed(self) -> dict[str, torch.Tensor]:
        """The weights by the names of pushes."""
        state = self.model.state_dict()
        if self.is_kimi:
            return tiny_kimi.text_names(tiny_kimi.published(self.model, state))
        return {name.removeprefix("model.") if ".visual." in name else name: x for name, x in state.items()}

    def log_probs(self, ids: Sequence[int], images: Sequence[np.ndarray] = (), num_prompt: int = 1) -> np.ndarray:
        """Those of all of `ids` but the first `num_prompt`. Placeholders behind those of the images were sampled."""
        import torch

        with torch.no_grad(), self._standing_in(ids, sum(map(self.num_tokens, images))) as read:
            logits = self.model(**self.inputs(read, images), use_cache=False).logits[0, num_prompt - 1 : -1]
        labels = torch.tensor(ids[num_prompt:])[:, None]
        return logits.float().log_softmax(-1).gather(1, labels)[:, 0].numpy()

    @contextmanager
    def _standing_in(self, ids: Sequence[int], num_image_tokens: int) -> Iterator[list[int]]:
        """Give `ids` with another token for sampled placeholders, which has their embedding meanwhile.

        transformers takes each placeholder for an image's.
        """
        sampled = [place for place, token in enumerate(ids) if token == IMAGE][num_image_tokens:]
        rows = self.model.get_input_embeddings().weight
        other = next(token for token in range(len(rows)) if token not in ids)
        kept = rows[other].clone()
        rows[other] = rows[IMAGE]
        try:
            yield [other if place in sampled else token for place, token in enumerate(ids)]
        finally:
            rows[other] = kept
