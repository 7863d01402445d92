"""Checks of what a run writes and reads again: its folder, paths with {rollout_id}."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fusionrl.config.config import Config


def template_errors(config: Config) -> list[str]:
    """List what is wrong with paths that have the number of the rollout in them."""
    errors = []
    run = config.run
    templates = {
        "--load-debug-rollout-data": run.load_debug_rollout_data,
        "--save-debug-rollout-data": run.save_debug_rollout_data,
        "--save-hf": config.checkpoint.save_hf,
    }
    for flag, template in templates.items():
        if template is None:
            continue
        try:
            first, second = (template.format(rollout_id=rollout_id) for rollout_id in (0, 1))
        except (KeyError, IndexError, ValueError):
            errors.append(f"{flag} {template}: {{rollout_id}} is the only field that a path may have")
            continue
        if flag == "--save-debug-rollout-data" and first == second:
            errors.append(f"{flag} {template}: every rollout would overwrite the one before; add {{rollout_id}}")
        if flag == "--load-debug-rollout-data" and not run.resume and not Path(first).is_file():
            errors.append(f"{flag} {template}: there is no file {first}")
    return errors


def output_errors(config: Config) -> list[str]:
    """List what else keeps a run from writing what it is asked for."""
    errors = []
    if config.run.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        errors.append("--use-tensorboard: the package tensorboard is not installed; pip install tensorboard")
    if config.run.resume and config.run.run_dir is None:
        errors.append("--resume: name the run's folder with --run-dir")
    return errors
