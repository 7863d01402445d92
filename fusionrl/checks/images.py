"""Checks of images: the flags, the files of the model's image processor, and engines that see."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fusionrl.config.config import Config
from fusionrl.config.engine_groups import engine_groups
from fusionrl.config.eval_sets import pixels_of_sets, readable_sets
from fusionrl.config.run_parts import uses_engines
from fusionrl.data.columns import ImageColumn, PromptColumns, media_errors
from fusionrl.data.images import widest_limits
from fusionrl.data.tokenizer import TemplateProbe, TokenizerFiles, read_tokenizer_files
from fusionrl.engines.images import CACHE_VARIABLE, KEEP_IDS_VARIABLE, ImageSettings, refused
from fusionrl.models import families
from fusionrl.models.shape import ModelShape
from fusionrl.plan.trained_parts import trains_tower


def image_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """List what is wrong with the flags of images, and with the model for them."""
    data, folder = config.data, config.model.hf_checkpoint
    settings: dict[str, object] = {"": data}
    if config.eval.eval_config is not None:
        settings |= {
            f"--eval-config {config.eval.eval_config}: set {each.name}: ": each for each in readable_sets(config)
        }
    errors = media_errors(data.multimodal_keys, "--multimodal-keys")
    columns: dict[ImageColumn, str] = {}  # what an evaluation set takes over from the flags is wrong once
    for where, each in settings.items():
        keys = each.multimodal_keys  # type: ignore[attr-defined]
        if where and keys != data.multimodal_keys:
            errors += media_errors(keys, f"{where}multimodal_keys")
        if (column := ImageColumn.of(each, folder)) is not None:
            columns.setdefault(column, where)
    for column, where in columns.items():
        errors += _column_errors(column, where, folder, shape)
    if columns and not errors and folder is not None:
        errors += _template_errors(config, next(iter(columns)), Path(folder))
    return list(dict.fromkeys(errors))


def _column_errors(column: ImageColumn, where: str, folder: str | None, shape: ModelShape | None) -> list[str]:
    errors, flag = [], f"{where}--multimodal-keys"
    if column.folder is not None and not Path(column.folder).is_dir():
        errors.append(f"{where}--multimodal-folder {column.folder}: there is no such folder")
    if folder is None:
        return [*errors, f"{flag}: which sizes images have is the model's matter: give --hf-checkpoint"]
    try:
        processor = column.processor
    except ValueError as error:
        if "--image" not in (text := str(error)):
            return [*errors, f"{flag}: {text}"]
        if where:  # a set's own
            text = re.sub("--image-(max|min)-pixels", r"image_\1_pixels", text)
        return [*errors, f"{where}{text}"]
    if shape is not None and (vision := shape.vision) is not None:
        files = (processor.limits.patch, processor.limits.merge, processor.placeholder)
        model = (vision.patch_size, vision.merge, vision.image_token)
        names = ("pixels of a patch", "patches of a token's side", "id of an image's token")
        for name, of_files, of_model in zip(names, files, model, strict=True):
            if of_files != of_model:
                cause = f"its image processor has {of_files} {name}, its model {of_model}"
                errors.append(f"{flag}: --hf-checkpoint {folder}: {cause}; take the files of one model")
    return errors


def image_text(column: ImageColumn | None, files: TokenizerFiles | None) -> str:
    """Return the text of the token that means an image; "" where the files do not say."""
    return "" if column is None or files is None else files.added_tokens.get(column.processor.placeholder, "")


def _template_errors(config: Config, column: ImageColumn, folder: Path) -> list[str]:
    """Render an image by the chat template, which has to write its placeholder once."""
    files = read_tokenizer_files(folder)
    text, data = image_text(column, files), config.data
    if not text or not files.templates or not (data.apply_chat_template or config.run.mode == "sft"):
        return []
    probe = TemplateProbe(files, data.apply_chat_template_kwargs, lambda messages, tools: None)
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    try:
        count = probe.render([{"role": "user", "content": content}], None).count(text)
    except Exception as error:  # whatever a template raises
        return [f"--multimodal-keys: the chat template of --hf-checkpoint {folder} refuses an image ({error})"]
    if count == 1:
        return []
    return [
        f"--multimodal-keys: the chat template of --hf-checkpoint {folder} writes {count} {text} for an image; take the"
        " template that came with the model"
    ]


def usable_columns(columns: PromptColumns) -> PromptColumns:
    """Return the columns, without that of images where its settings cannot be read: `image_errors` says why."""
    try:
        is_usable = columns.images is not None and columns.images.processor is not None
    except ValueError:
        is_usable = False
    return columns if is_usable or columns.images is None else replace(columns, images=None)


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

    Raises ValueError: with one of them, the engine sees other images than the trainers, or features of earlier weights.
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
