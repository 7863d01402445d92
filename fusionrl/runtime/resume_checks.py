"""--resume: the checkpoint that a run continues from, and the checks that need no process of the run.

`fusionrl plan` and `train` make them before Ray starts. The trainers and the Buffer check the same when they load.
"""

import json
from pathlib import Path

from fusionrl.base.imports import quiet
from fusionrl.config.config import Config
from fusionrl.config.run_parts import has_own_source
from fusionrl.data.sample_json import SourceState
from fusionrl.models.shape import ModelShape, shape_difference
from fusionrl.models.trainable import Adapted, adapted_difference, saved_in
from fusionrl.plan.plan import Plan
from fusionrl.plan.trained_parts import adapted_of, adapter_names, has_several_adapters
from fusionrl.runtime.checkpoints import Checkpoint, Checkpoints

MAX_CHECKED_PROMPTS = 50_000  # of larger data only the Buffer compares the prompts: reading them twice takes minutes


def find_checkpoint(config: Config, checkpoints: Checkpoints) -> Checkpoint | None:
    """The newest checkpoint of the run, checked; None: the run starts at step 0. Raises ValueError if it is damaged."""
    latest = checkpoints.latest() if config.run.resume else None
    if latest is not None:
        checkpoints.check(latest)
    return latest


def resume_errors(config: Config, plan: Plan) -> list[str]:
    """List the errors that keep the run from resuming from its newest checkpoint: damage, another model, other data."""
    if not config.run.resume or config.run.run_dir is None:
        return []
    try:
        latest = find_checkpoint(config, Checkpoints(Path(config.run.run_dir) / "checkpoints"))
    except ValueError as error:
        return [str(error)]
    return [] if latest is None else _model_errors(latest.path, config, plan) + _data_errors(latest.path, config)


def nothing_left(config: Config, plan: Plan) -> str | None:
    """Return the error of a --resume of a finished run; None if steps are left."""
    if not config.run.resume or config.run.run_dir is None:
        return None
    latest = Checkpoints(Path(config.run.run_dir) / "checkpoints").latest()
    if latest is None or not plan.num_rollout or latest.rollout_id + 1 < plan.num_rollout:
        return None
    return (
        f"nothing is left to do: {latest.path.name} is after step {latest.rollout_id + 1}, and the run ends after step"
        f" {plan.num_rollout}; raise --num-rollout (or --num-epoch) to continue"
    )


def _model_errors(path: Path, config: Config, plan: Plan) -> list[str]:
    if plan.layout is None or config.run.mode == "reject-sampling":  # whose checkpoints have no trainers
        return []
    adapted = adapted_of(config, plan.shape)
    names = adapter_names(config) if has_several_adapters(config) else ()
    saved = sorted(folder.name.removeprefix("trainer-") for folder in path.glob("trainer-*"))
    if saved != sorted(names):
        has = f"has the adapters {', '.join(saved)}" if saved else "has one adapter, or none"
        cure = "a resume needs the --lora-adapters of the run's start; a new run starts with NAME=FOLDER of --save-hf"
        return [f"checkpoint {path}: it {has}; {cure}"]
    folders = [f"trainer-{name}" for name in names] or ["trainer"]
    models: dict[str, tuple[ModelShape, Adapted | None]] = dict.fromkeys(folders, (plan.shape, adapted))
    if plan.auxiliary:
        models[plan.auxiliary.role] = plan.auxiliary.shape, None
    errors = []
    for name, (shape, adapters) in models.items():
        if not (path / name).is_dir():
            errors.append(f"checkpoint {path}: it has no {name}; give the --mode and the estimator of the run's start")
            continue
        try:
            description = json.loads((path / name / "fusionrl.json").read_text(encoding="utf-8"))
            difference = shape_difference(path / name, description["shape"], shape)
            difference = difference or adapted_difference(path / name, saved_in(description), adapters, shape)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # the trainers say what is wrong with it
        if difference is not None:
            errors.append(difference)
    return errors


def _data_errors(path: Path, config: Config) -> list[str]:
    """Compare the prompts with those of the checkpoint, as the Buffer does when it loads."""
    data, run = config.data, config.run
    if has_own_source(config):  # a user's code runs in the Buffer alone
        return []
    if data.prompt_data is None or run.mode == "eval" or run.load_debug_rollout_data:
        return []
    try:
        state: SourceState = json.loads((path / "buffer.json").read_text(encoding="utf-8"))["source"]
        num_prompts = sum(data_set["num_prompts"] for data_set in state["sets"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # the Buffer says what is wrong with it
    if num_prompts > MAX_CHECKED_PROMPTS:
        return []
    from fusionrl.buffer.data_source import RolloutDataSourceWithBuffer  # with a tokenizer: only for a resume

    try:
        with quiet():
            RolloutDataSourceWithBuffer(config.to_args()).load_state_dict(state)
    except ValueError as error:
        return [str(error)]
    except (OSError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return []  # as above
    return []
