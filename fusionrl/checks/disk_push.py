"""Checks of the flags of weight pushes by files."""

from __future__ import annotations

import importlib.util

from fusionrl.base.packages import install_hint
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of
from fusionrl.engines.delta import CHECKSUM_PACKAGES, COMPRESSION_PACKAGE

# Flags of weight pushes that only those by files look at.
_OF_DISK = (
    *("update_weight_mode", "update_weight_disk_dir", "update_weight_disk_keep_files"),
    *("update_weight_local_checkpoint_dir", "update_weight_delta_encoding", "update_weight_delta_checksum"),
    "custom_update_weight_post_write_path",
)


def disk_push_errors(config: Config) -> list[str]:
    """List what is wrong with the flags of weight pushes by files."""
    weights, fields = config.weights, type(config.weights).model_fields
    set_fields = [field for field in _OF_DISK if getattr(weights, field) != fields[field].default]
    if weights.update_weight_transport != "disk":
        return [f"{flag_of(field)}: it needs --update-weight-transport disk" for field in set_fields]
    errors = []
    is_delta = weights.update_weight_mode == "delta"
    if is_delta and weights.update_weight_local_checkpoint_dir is None:
        errors.append(
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir: a folder on each host of engines,"
            " with room for the weights, where the changes are applied"
        )
    if not is_delta and "update_weight_delta_encoding" in set_fields:
        errors.append("--update-weight-delta-encoding has no effect without --update-weight-mode delta; add it")
    kind = weights.update_weight_delta_checksum
    needed = {f"--update-weight-delta-checksum {kind}": CHECKSUM_PACKAGES.get(kind)}
    needed["--update-weight-mode delta"] = COMPRESSION_PACKAGE if is_delta else None
    for flag, package in needed.items():
        if package is not None and importlib.util.find_spec(package) is None:
            errors.append(f"{flag}: the package {package} is not installed; {install_hint(package)}")
    return errors
