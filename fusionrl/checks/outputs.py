"""Checks of what a run writes and reads again: its folder, its disks, paths with {rollout_id}, profiles."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fusionrl.base.wording import existing_parent, install_hint, names_in, nearest
from fusionrl.config.config import Config
from fusionrl.config.run import ProfileOrder
from fusionrl.config.run_parts import changes_weights, saves, uses_engines, uses_trainers
from fusionrl.models.trainable import num_adapter_parameters
from fusionrl.observe.run_dir import RunDir, exported_rollout, holds_run, own_config_file
from fusionrl.plan.devices import GIB
from fusionrl.plan.plan import Plan
from fusionrl.plan.trained_parts import adapter_folders, adapters_of

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
    errors, export = [], _export(config, config.run.num_rollout)
    if config.run.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        errors.append(f"--use-tensorboard: the package tensorboard is not installed; {install_hint('tensorboard')}")
    if config.run.resume and config.run.run_dir is None:
        errors.append(NO_FOLDER)
    paths = {
        "--run-dir": config.run.run_dir,
        "--save-hf": export,
        "--save-debug-rollout-data": config.run.save_debug_rollout_data,
        "--reject-sampling-output": config.reject_sampling.reject_sampling_output,
    }  # some of it is made only at the end of the run, when a wrong path would cost all its work
    errors += [error for flag, path in paths.items() if path and (error := unwritable(flag, Path(path)))]
    return errors + export_errors(config, config.run.num_rollout) + ([] if config.run.resume else folder_errors(config))


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


def export_errors(config: Config, steps: int | None) -> list[str]:
    """List the error of a folder of --save-hf that is there already; but for one that this run wrote, before it died.

    steps  of the run; None: with --num-epoch they follow from the data, which are not read yet
    """
    export, run_dir = _export(config, steps), config.run.run_dir
    if export is None or not Path(export).exists():
        return []
    last = exported_rollout(Path(run_dir), Path(export)) if config.run.resume and run_dir is not None else None
    if last is not None and steps in (None, last + 1):
        return []
    return [f"--save-hf {export}: it exists already; give another folder, or {{rollout_id}} in its name"]


def _export(config: Config, steps: int | None) -> str | None:
    """Return the folder of --save-hf; with {rollout_id} in it where the number of steps is not known yet."""
    template = config.checkpoint.save_hf
    if template is None or steps is None:
        return template
    try:
        return template.format(rollout_id=steps - 1)
    except (KeyError, IndexError, ValueError):
        return template  # `template_errors` refuses it


def resume_folder_errors(config: Config, config_file: str | None = None) -> list[str]:
    """List what is wrong with the folder of --resume; a short command line needs the flags of the run in it.

    config_file  of --config, which is read in place of these flags
    """
    errors, run_dir, is_short = folder_errors(config), config.run.run_dir, config.model.hf_checkpoint is None
    if is_short and run_dir is None:
        errors.append(NO_FOLDER)
    elif not errors and is_short and run_dir and own_config_file(Path(run_dir)) is None:
        errors.append(f"--resume: --run-dir {run_dir} has no config.json of yours with a run's flags; give all of them")
    elif not errors and is_short and config_file:
        errors.append(
            f"--config {config_file}: --resume takes the flags of the run itself only without --config; "
            f"write `fusionrl train --run-dir {run_dir} --resume`, or give all flags, as --hf-checkpoint"
        )
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


def profile_errors(config: Config, device: str) -> list[str]:
    """List what is wrong with the flags of a profile; `device`: "cpu" or "cuda"."""
    try:
        order = ProfileOrder.of(config)
    except ValueError as error:
        return [str(error)]
    if order is None:
        return []
    errors = []
    if order.tool != "torch" and device == "cpu":
        errors.append(f"--profile-tool {order.tool}: it sees what a GPU does, and this run is on a CPU; take torch")
    elif order.tool == "nsys" and shutil.which("nsys") is None:
        errors.append("--profile-tool nsys: no `nsys` on the PATH; install Nsight Systems on every node, or take torch")
    num_trainers = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    over = sorted(rank for rank in order.trainers or () if rank >= num_trainers)
    if over and uses_trainers(config):
        errors.append(f"--profile-ranks {over[0]}: trainers have the ranks 0 to {num_trainers - 1}")
    if order.trainers == frozenset() and not (order.engines and uses_engines(config)):
        errors.append("--profile-ranks: no rank is left to profile; give a trainer's rank (0)")
    return errors


def profile_plan_errors(config: Config, plan: Plan) -> list[str]:
    """List the steps and engines of a profile that the plan does not have; the flags are right in themselves."""
    order = ProfileOrder.of(config)
    if order is None:
        return []
    errors = [
        f"--profile-steps {first}: the run ends with step {plan.num_rollout}"
        for first, _ in order.steps
        if first > plan.num_rollout > 0
    ]
    over = sorted(index for index in order.engines or () if index >= plan.num_engines)
    if over and plan.num_engines:
        errors.append(f"--profile-ranks engine-{over[0]}: the last of the engines is engine-{plan.num_engines - 1}")
    return errors


_FEWEST_FREE = 2 * GIB  # of a disk that a run writes to, whatever its size
_STATE_BYTES = 14  # of a parameter in a checkpoint: bf16 weights, fp32 weights and two moments
_STATE_BYTES_FP32 = 12


def disk_report(
    folders: Mapping[str, Path], needed: Mapping[str, tuple[str, float]]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Compare the room of the disks of `folders` (flag → folder) with `needed` (flag → what is written, bytes).

    Return (a text, its cure) for each disk with too little room, and a text for each of the others.
    """
    problems, facts = [], []
    for name, folder in folders.items():
        parent = folder if folder.is_dir() else existing_parent(folder)[0]
        if not os.access(parent, os.W_OK | os.X_OK):
            cure = f"make it writable, or name another folder ({name})"
            problems.append((f"{name} {folder}: this user may not write to {parent}", cure))
            continue
        try:
            free = float(shutil.disk_usage(parent).free)
        except OSError as error:
            problems.append((f"{name} {folder}: {error}", f"name another folder ({name})"))
            continue
        purpose, num_bytes = needed.get(name, ("", 0.0))
        takes = f"{purpose} take {num_bytes / GIB:.1f} GiB"
        if free < max(num_bytes, _FEWEST_FREE):
            is_large = num_bytes > _FEWEST_FREE
            least = f"and {takes}" if is_large else f"less than {_FEWEST_FREE / GIB:.0f}"
            cure = f"free some, or name a folder on another disk ({name})"
            cure += "; --keep-checkpoints N keeps the newest N" if is_large and name == "--run-dir" else ""
            problems.append((f"{name} {folder}: {free / GIB:.1f} GiB free, {least}", cure))
        else:
            more = f", {takes}" if num_bytes >= GIB / 20 else ""
            facts.append(f"{free / GIB:.0f} GiB free for {name} {folder}{more}")
    return problems, facts


def disks_of_run(config: Config | None, plan: Plan | None) -> tuple[dict[str, Path], dict[str, tuple[str, float]]]:
    """Return `runs/`, or the run's folders, and the checkpoints and weights that the run keeps there, by flag."""
    folder = Path(config.run.run_dir) if config is not None and config.run.run_dir else Path("runs")
    folders, needed = {"--run-dir": folder, **temporary_folder()}, {}
    if config is not None and config.checkpoint.save_hf:
        folders["--save-hf"] = Path(config.checkpoint.save_hf).parent
    if config is not None and plan is not None:
        weights = float(_num_saved(config, plan) * (4 if plan.precision == "fp32" else 2))
        needed = {"--run-dir": ("checkpoints", checkpoint_bytes(config, plan)), "--save-hf": ("weights", weights)}
    return folders, needed


def disk_warnings(config: Config, plan: Plan) -> list[str]:
    """Return a text, with its cure, for each disk that has too little room."""
    return [f"{text}; {cure}" for text, cure in disk_report(*disks_of_run(config, plan))[0]]


def checkpoint_bytes(config: Config, plan: Plan) -> float:
    """Return the bytes of all checkpoints that the run keeps at once."""
    options = config.checkpoint
    if options.no_save or not saves(config) or not changes_weights(config):
        return 0.0
    num_saved = -(-plan.num_rollout // options.save_interval) if options.save_interval else 1
    if options.keep_checkpoints is not None:
        num_saved = min(num_saved, options.keep_checkpoints + 1)  # the newest is written before the oldest goes
    parameter = _STATE_BYTES_FP32 if plan.precision == "fp32" else _STATE_BYTES
    return float(max(num_saved, 1) * _num_saved(config, plan) * parameter)


def snapshot_bytes(config: Config, plan: Plan) -> float:
    """Return the bytes of a snapshot of all trainers: fp32 weights and two moments of each parameter."""
    num_models = 1 if plan.auxiliary is None else 2
    return float(num_models * _num_saved(config, plan) * _STATE_BYTES_FP32)


def _num_saved(config: Config, plan: Plan) -> int:
    """Return the number of values that checkpoints and --save-hf have: of the model, or its adapters."""
    adapters = adapters_of(config, plan.shape)
    if adapters is None:
        return plan.shape.num_parameters
    return len(adapter_folders(config)) * num_adapter_parameters(plan.shape, adapters)


def temporary_folder() -> dict[str, Path]:
    """Return the folder in which Ray keeps its sockets and spills what does not fit into memory, by its variable."""
    return {"TMPDIR": Path(tempfile.gettempdir())}
