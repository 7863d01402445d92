"""Settings of engines that see. Pure."""

from dataclasses import dataclass

CACHE_VARIABLE = "SGLANG_VLM_CACHE_SIZE_MB"
"""MB of towers' features that an engine keeps; weight pushes do not empty it."""
KEEP_IDS_VARIABLE = "SGLANG_MM_AVOID_RETOKENIZE"
_PREPROCESSED_MB = 256  # of images that were decoded and cut: siblings send the same


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
