"""Checks of what a run writes and reads again: its folder, paths with {rollout_id}."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from fusionrl.base.nearest import existing_parent, names_in, nearest
from fusionrl.config.config import Config
from fusionrl.observe.run_dir import RunDir, holds_run, own_config_file

NO_FOLDER = "--resume: name the run's folder with --run-dir"


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
        errors.append(NO_FOLDER)
    return errors if config.run.resume else errors + folder_errors(config)


def resume_folder_errors(config: Config) -> list[str]:
    """List what is wrong with the folder of --resume; a short command line needs the flags of the run in it."""
    errors, run_dir, is_short = folder_errors(config), config.run.run_dir, config.model.hf_checkpoint is None
    if is_short and run_dir is None:
        errors.append(NO_FOLDER)
    elif not errors and is_short and run_dir and own_config_file(Path(run_dir)) is None:
        errors.append(f"--resume: --run-dir {run_dir} has no config.json of yours with a run's flags; give all of them")
    return errors


def folder_errors(config: Config) -> list[str]:
    """List what keeps the run from having its folder: a run that is in it already, or a short --resume without one."""
    if config.run.run_dir is None:
        return []
    path = Path(config.run.run_dir)
    if config.run.resume and not path.exists():
        # A launch script may always pass --resume; only a command line that wants the folder's flags needs the folder.
        is_short = config.model.hf_checkpoint is None
        return [f"--resume: there is no folder --run-dir {path}; {_nearest(path)}"] if is_short else []
    try:
        RunDir.check(path, config.run.resume)
    except (ValueError, OSError) as error:
        return [str(error) if isinstance(error, ValueError) else f"--run-dir: {error}"]
    return []


def first_start_warning(config: Config) -> str | None:
    """Return the warning of a --resume that starts a new run, as a mistyped folder would make it; None for others."""
    run_dir = config.run.run_dir
    if not config.run.resume or run_dir is None or Path(run_dir).exists():
        return None
    return f"--resume: there is no folder --run-dir {run_dir}: a new run starts there ({_nearest(Path(run_dir))})"


def _nearest(path: Path) -> str:
    """Name the folders that a mistyped path may have meant."""
    if found := nearest(path, Path.is_dir):
        return f"the nearest one is {found}"
    parent, _ = existing_parent(path)
    shown = parent if path.is_absolute() else Path(os.path.relpath(parent))
    runs = names_in(parent, holds_run)[:8]
    return f"{shown} has " + (f"the runs {', '.join(runs)}" if runs else "no run")
