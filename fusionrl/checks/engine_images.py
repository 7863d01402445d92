"""Settings of engines that see, and checks of the user's own."""

import os
from collections.abc import Mapping

from fusionrl.config.config import Config
from fusionrl.config.engine_groups import engine_groups
from fusionrl.config.eval_sets import pixels_of_sets
from fusionrl.config.run_parts import uses_engines
from fusionrl.data.processor_files import widest_limits
from fusionrl.engines.image_settings import CACHE_VARIABLE, KEEP_IDS_VARIABLE, ImageSettings, refused
from fusionrl.models import families
from fusionrl.models.shape import ModelShape
from fusionrl.plan.vision import trains_tower


def image_settings(config: Config, shape: ModelShape) -> ImageSettings | None:
    """Return what a run's policy engines need; None: the run has no images.

    Their limits are so wide that they leave the normal forms of all sets as they are.
    """
    folder = config.model.hf_checkpoint
    if shape.vision is None or folder is None:
        return None
    pixels = pixels_of_sets(config)
    if all(limit is None for pair in pixels for limit in pair):
        return ImageSettings(trains_tower(config, shape))
    limits = widest_limits(folder, pixels)
    return ImageSettings(trains_tower(config, shape), limits.min_pixels, limits.max_pixels)


def check_settings(
    settings: ImageSettings,
    device: str | None,
    args: Mapping[str, object],
    prefix: str = "--sglang-",
    environment: Mapping[str, str] | None = None,
) -> None:
    """Check the user's own settings of an engine that is asked about images.

    device       None: not known yet
    args         fields of `ServerArgs`
    prefix       of their flags, for messages
    environment  default: this process's

    Raises:
        ValueError: with one of them, the engine sees other images than the trainers, or features of earlier weights.
    """
    env = os.environ if environment is None else environment
    if settings.trains_tower and env.get(CACHE_VARIABLE, "0") != "0":
        raise ValueError(
            f"{CACHE_VARIABLE}={env[CACHE_VARIABLE]}: SGLang would answer with features of images from before a weight"
            " push, for it keeps them; unset the variable, or freeze the vision tower (--freeze-vision)"
        )
    if env.get(KEEP_IDS_VARIABLE, "1").lower() not in ("1", "true"):
        raise ValueError(
            f"{KEEP_IDS_VARIABLE}={env[KEEP_IDS_VARIABLE]}: SGLang would tokenize prompts with images again, into other"
            " tokens than were sampled; unset the variable"
        )
    if (error := refused(args, prefix)) is not None:
        raise ValueError(error)
    backend = args.get("image_processor_backend", "auto")
    if device == "cpu" and backend not in ("auto", "pil"):
        raise ValueError(f"{prefix}image-processor-backend {backend}: it is for engines on a GPU; leave it out")
    if config := args.get("mm_process_config"):
        raise ValueError(
            f"{prefix}mm-process-config {config!r}: engines and trainers see the same images only where"
            " fusionrl sets their limits; use --image-min-pixels and --image-max-pixels"
        )


def engine_image_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """List settings with which engines would see other images than trainers, or know features of earlier weights."""
    if shape is None or shape.vision is None or not uses_engines(config):
        return []
    common, device = config.passthrough.sglang, config.cluster.device
    groups = [(f"--engine-group {group.name}: ", common | group.server_args) for group in engine_groups(config)]
    errors = []
    try:
        form = families.get_family(shape.model_type).published
        if config.cluster.rollout_external_engine_addrs and form is not None and form.is_nested:
            errors.append(
                f"--rollout-external-engine-addrs: SGLang computes {form.model_type} otherwise than its checkpoint,"
                " which only the run's own engines correct; leave it out"
            )
        settings = ImageSettings(trains_tower(config, shape))  # limits of pixels are a matter of `image_errors`
        for prefix, args in [("--sglang-", common), *groups]:
            check_settings(settings, None if device == "auto" else device, args, prefix)
    except ValueError as error:
        errors.append(str(error))
    return errors
