"""Checks of what a run writes and reads again: its folder, paths with {rollout_id}."""

import importlib.util
import os
from pathlib import Path

from fusionrl.base.packages import install_hint
from fusionrl.base.spelling import existing_parent, names_in, nearest
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
    """List other reasons why a run cannot write its files."""
    errors = []
    if config.run.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        errors.append(f"--use-tensorboard: the package tensorboard is not installed; {install_hint('tensorboard')}")
    if config.run.resume and config.run.run_dir is None:
        errors.append(NO_FOLDER)
    paths = {
        "--run-dir": config.run.run_dir,
        "--save-hf": _export(config),
        "--save-debug-rollout-data": config.run.save_debug_rollout_data,
        "--reject-sampling-output": config.reject_sampling.reject_sampling_output,
    }  # some of it is made only at the end of the run, when a wrong path would cost all its work
    errors += [error for flag, path in paths.items() if path and (error := unwritable(flag, Path(path)))]
    return errors + _export_errors(config) + ([] if config.run.resume else folder_errors(config))


def unwritable(flag: str, path: Path) -> str | None:
    """Return the error of a path that cannot be made: a file blocks it, or this user cannot write its folder."""
    if path.exists():
        return None  # what may be there already is another check's
    parent, part = existing_parent(path)
    obstacle = parent / part
    if obstacle.exists() and obstacle != path.absolute():
        return f"{flag} {path}: {obstacle} is a file, so nothing can be made in it; name another path"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{flag} {path}: {parent} cannot be written by this user; name another path"
    return None


def _export(config: Config) -> str | None:
    """Return the folder of --save-hf; with {rollout_id} in it where the number of steps is not known yet."""
    template, steps = config.checkpoint.save_hf, config.run.num_rollout
    if template is None or steps is None:
        return template
    try:
        return template.format(rollout_id=steps - 1)
    except (KeyError, IndexError, ValueError):
        return template  # `template_errors` refuses it


def _export_errors(config: Config) -> list[str]:
    """Refuse a folder of --save-hf that exists: it is written at the end, when the whole run would be lost by it."""
    folder = _export(config)
    if folder is None or not Path(folder).exists():
        return []
    return [f"--save-hf {folder}: it exists already; give another folder, or {{rollout_id}} in its name"]


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
    if match := nearest(path, Path.is_dir):
        return f"the nearest one is {match}"
    parent, _ = existing_parent(path)
    displayed = parent if path.is_absolute() else Path(os.path.relpath(parent))
    runs = names_in(parent, holds_run)[:8]
    return f"{displayed} has " + (f"the runs {', '.join(runs)}" if runs else "no run")
