"""Settings of engines that see. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

CACHE_VARIABLE = "SGLANG_VLM_CACHE_SIZE_MB"
"""MB of towers' features that an engine keeps; weight pushes do not empty it."""
KEEP_IDS_VARIABLE = "SGLANG_MM_AVOID_RETOKENIZE"
_PREPROCESSED_MB = 256  # of images that were decoded and cut: siblings send the same
_REFUSED = {
    "enable_multimodal": (False, "the engines would not see"),
    "language_model_only": (True, "the engines would not see"),
    "encoder_only": (True, "the engines would generate nothing"),
    "mm_preprocess_cache_size_mb": (0, "each sibling's images would be decoded and cut anew"),
}


@dataclass(frozen=True)
class ImageSettings:
    """Settings of an engine for images.

    trains_tower            whether pushes change the vision tower
    min_pixels, max_pixels  of an image's normal form; None: as the model's folder says
    """

    trains_tower: bool
    min_pixels: int | None = None
    max_pixels: int | None = None

    def arguments(self, device: str) -> dict[str, object]:
        """Return fields of `ServerArgs`."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        limits = {name: value for name, value in limits.items() if value is not None}
        return {
            "mm_preprocess_cache_size_mb": _PREPROCESSED_MB,
            **({"mm_process_config": {"image": limits}} if limits else {}),
            # Others pass on the device to a processor that does not know it.
            **({"image_processor_backend": "pil"} if device == "cpu" else {}),
        }

    def environment(self) -> dict[str, str]:
        """Return environment variables of an engine."""
        return {KEEP_IDS_VARIABLE: "1", **({CACHE_VARIABLE: "0"} if self.trains_tower else {})}


def refused(args: Mapping[str, object], prefix: str) -> str | None:
    """Return why an engine with these fields of `ServerArgs` cannot be asked about images; None: it can.

    prefix  of their flags, for the message
    """
    for name, (wrong, reason) in _REFUSED.items():
        if name in args and args[name] == wrong:
            return f"{prefix}{name.replace('_', '-')} {wrong}: {reason}; leave it out"
    return None
