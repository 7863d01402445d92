"""Kimi-VL in SGLang, corrected from outside on every device: its processor, its projector, and the names in pushes.

SGLang 0.5.23 asks the processor how many tokens an image has by a function that Kimi-VL's processor lacks. It then
tokenizes the prompt again, so the model may see other tokens than were sampled. `KimiProcessor` has that function; it
combines the tokenizer and the normal form of images. The projector in SGLang has another GELU than the checkpoint, and
its tower keeps the table of positions that it has stretched to an image's size when weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from fusionrl.base.imports import when_imported
from fusionrl.data.images import ProcessorFiles, as_rgb, normal_form, read_processor_files

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

_MODEL_TYPE = "kimi_vl"


def register() -> None:
    """Change SGLang's modules as this process, and its forks, import them. Call it once."""
    when_imported("sglang.srt.models.kimi_vl", _mend)
    when_imported(
        "sglang.srt.multimodal.customized_mm_processor_utils",
        lambda module: module._CUSTOMIZED_MM_PROCESSOR.setdefault(_MODEL_TYPE, KimiProcessor),
    )


def _mend(module: ModuleType) -> None:
    """Give the projector its GELU; let a push have the trainers' names, and end what was kept of earlier weights."""
    from fusionrl.models.families import published_form
    from fusionrl.models.hf_folder import whole_name

    vars(module)["QuickGELU"] = module.GELUActivation
    kind, form = module.KimiVLForConditionalGeneration, published_form(_MODEL_TYPE)
    assert form is not None
    original: Callable[..., object] = kind.load_weights

    def renamed(weights: Iterable[tuple[str, *tuple[object, ...]]]) -> Iterator[tuple[object, ...]]:
        for name, *others in weights:
            yield name if name.startswith(tuple(form.prefixes)) else whole_name(name, form), *others

    def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, *tuple[object, ...]]]) -> object:
        vars(model.get_submodule("vision_tower.patch_embed.pos_emb"))["_interpolated_pos_emb_cache"].clear()
        return original(model, renamed(weights))

    kind.load_weights = load_weights


class KimiProcessor:
    """A processor of images and text, as far as SGLang asks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, files: ProcessorFiles) -> None:
        self.tokenizer, self._files = tokenizer, files
        self.media_processor = self  # where SGLang looks for `media_tokens_calculator`

    @classmethod
    def from_pretrained(cls, folder: str | Path, *args: object, **options: object) -> KimiProcessor:
        """Load it from a model's folder."""
        from transformers import AutoTokenizer

        known = {name: options[name] for name in ("trust_remote_code", "revision") if name in options}
        return cls(AutoTokenizer.from_pretrained(folder, **known), read_processor_files(folder))

    def media_tokens_calculator(self, medium: Mapping[str, Image]) -> int:
        """Return the tokens of an image, which is in the normal form already, or will be brought to it."""
        image = medium["image"]
        return self._files.limits.num_tokens(*self._size(image.height, image.width))

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the normal form; a run may have wider limits than its model's files."""
        unit = self._files.limits.unit
        return self._files.limits.fit(height, width) if height % unit or width % unit else (height, width)

    def __call__(self, text: Sequence[str], images: Sequence[Image] = (), **options: object) -> Mapping[str, object]:
        """Return the ids of one text, with a placeholder for each token of an image, and the images in patches."""
        import torch
        from transformers import BatchFeature

        (own,) = text
        ids = np.asarray(self.tokenizer.encode(own, add_special_tokens=False), np.int64)
        places, counts = ids == self._files.placeholder, np.ones(len(ids), np.int64)
        if places.sum() != len(images):
            raise ValueError(f"{places.sum()} placeholders of images in the prompt, but {len(images)} images")
        counts[places] = [self.media_tokens_calculator({"image": image}) for image in images]
        found: dict[str, object] = {"input_ids": torch.from_numpy(np.repeat(ids, counts))[None]}
        if images:
            values, grids = zip(*map(self._patches, images), strict=True)
            found |= {"pixel_values": torch.from_numpy(np.concatenate(values)), "image_grid_hws": torch.tensor(grids)}
        return BatchFeature(found)

    def _patches(self, image: Image) -> tuple[np.ndarray, tuple[int, int]]:
        """Return ([rows * columns, channels, patch, patch] float32, (rows, columns)) of an image."""
        picture, p = as_rgb(image), self._files.limits.patch
        is_normal = self._size(picture.height, picture.width) == (picture.height, picture.width)
        pixels = np.asarray(picture) if is_normal else normal_form(picture, self._files.limits)
        mean, std = (np.asarray(numbers, np.float32) for numbers in (self._files.mean, self._files.std))
        values: np.ndarray = (pixels.astype(np.float32) * np.float32(1 / 255) - mean) / std
        rows, columns = pixels.shape[0] // p, pixels.shape[1] // p
        values = values.reshape(rows, p, columns, p, 3).transpose(0, 2, 4, 1, 3)
        return values.reshape(rows * columns, 3, p, p), (rows, columns)
