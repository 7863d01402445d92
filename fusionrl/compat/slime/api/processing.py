"""Names of `slime.utils.processing_utils` and `slime.utils.mask_utils`. Only text is trained on here yet."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.data import tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_PATCH_SIZE = 14


def load_tokenizer(name_or_path: str, **kwargs: object) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, loaded once a process; with keywords other than trust_remote_code, anew."""
    if set(kwargs) <= {"trust_remote_code"} and Path(name_or_path).is_dir():
        return tokenizer.load_tokenizer(name_or_path)
    from transformers import AutoTokenizer  # seconds to import

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: object) -> None:
    """Return None, as slime does for a model of text alone: images are not supported yet."""


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return keyword arguments of a Hugging Face processor: the inputs, ids as lists, all else as torch tensors."""
    inputs: dict[str, Any] = dict(multimodal_inputs or {})
    inputs["text_kwargs"] = {**inputs.get("text_kwargs", {}), "return_tensors": None, "return_mm_token_type_ids": False}
    for kind in ("audio_kwargs", "images_kwargs", "videos_kwargs"):
        inputs[kind] = {**inputs.get(kind, {}), "return_tensors": "pt"}
    return inputs


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return an image (PIL) as a data URI of a PNG, as SGLang takes it."""
    data = io.BytesIO()
    image.convert("RGB").save(data, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return the length of each mask from its first 1 on; 0 for a mask without one."""
    masks = [list(mask) for mask in loss_masks]
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in masks]
