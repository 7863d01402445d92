"""Checks of the weight files that a run reads, and of the flags of weight pushes by files."""

from __future__ import annotations

import importlib.util

from fusionrl.base.packages import install_hint
from fusionrl.config.config import Config
from fusionrl.config.run_parts import uses_trainers
from fusionrl.engines.delta import CHECKSUM_PACKAGES, COMPRESSION_PACKAGE
from fusionrl.models.quantization import read_quantization
from fusionrl.models.shape import read_model_shape
from fusionrl.models.weight_shapes import shape_errors
from fusionrl.plan.critic import auxiliary_role


def weight_shape_errors(config: Config) -> list[str]:
    """List where a folder's files disagree with its config.json, with tensor, both shapes and file.

    A folder that cannot be read, or that holds a model of no family here, is left out: the check of its flag says so,
    and engines may know more families than the trainers.
    """
    errors = []
    for flag, folder, by_trainers in _folders(config):
        try:
            shape = read_model_shape(folder, flag)
            if flag == "--critic-load":
                shape = shape.with_value_head()
            quantization = read_quantization(folder, flag) if by_trainers else None
            errors += shape_errors(folder, shape, flag, quantization=quantization, is_loaded=by_trainers)
        except (ValueError, OSError):
            continue
    return errors


def _folders(config: Config) -> list[tuple[str, str, bool]]:
    """Return flag, folder, and whether trainers load it (else engines alone), of each folder that is read."""
    model, algorithm, trainers = config.model, config.algorithm, uses_trainers(config)
    folders: list[tuple[str, str | None, bool]] = []
    if not model.debug_random_weights:
        folders.append(("--hf-checkpoint", model.hf_checkpoint, trainers and model.megatron_checkpoint is None))
    if trainers:
        folders.append(("--ref-load", model.ref_load, True))
        loads = {"critic": config.critic.critic_load, "prm": config.prm.prm_load}
        folders += [(f"--{role}-load", load, True) for role, load in loads.items() if role == auxiliary_role(config)]
    if algorithm.use_opd:
        is_in_trainers = algorithm.opd_type == "megatron"
        folders.append(("--opd-teacher-load", algorithm.opd_teacher_load, is_in_trainers))
    folders.append(("--rm-model", config.reward.rm_model, False))
    return [(flag, folder, by_trainers) for flag, folder, by_trainers in folders if folder is not None]


def disk_push_errors(config: Config) -> list[str]:
    """List what is wrong with the flags of weight pushes by files."""
    weights, errors = config.weights, []
    if weights.update_weight_transport != "disk":
        return []
    is_delta = weights.update_weight_mode == "delta"
    if is_delta and weights.update_weight_local_checkpoint_dir is None:
        errors.append("--update-weight-mode delta needs --update-weight-local-checkpoint-dir: a folder on each host")
    kind = weights.update_weight_delta_checksum
    needed = {f"--update-weight-delta-checksum {kind}": CHECKSUM_PACKAGES.get(kind)}
    needed["--update-weight-mode delta"] = COMPRESSION_PACKAGE if is_delta else None
    for flag, package in needed.items():
        if package is not None and importlib.util.find_spec(package) is None:
            errors.append(f"{flag}: the package {package} is not installed; {install_hint(package)}")
    return errors
