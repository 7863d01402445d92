"""Checks of settings for images."""

from fusionrl.config.config import Config
from fusionrl.config.engine_groups import engine_groups
from fusionrl.config.run_parts import uses_engines
from fusionrl.engines.image_settings import ImageSettings, check_settings
from fusionrl.models.shape import ModelShape


def engine_image_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """List settings with which engines would see other images than trainers, or know features of earlier weights."""
    if shape is None or not uses_engines(config):
        return []
    common, device = config.passthrough.sglang, config.cluster.device
    groups = [(f"--engine-group {group.name}: ", common | group.server_args) for group in engine_groups(config)]
    errors = []
    try:
        if (settings := ImageSettings.of(config, shape)) is not None:
            for prefix, args in [("--sglang-", common), *groups]:
                check_settings(settings, None if device == "auto" else device, args, prefix)
    except ValueError as error:
        errors.append(str(error))
    return errors
