"""Checks of --eval-num-gpus: engines that evaluate and do nothing else."""

from __future__ import annotations

from fusionrl.config.config import Config


def eval_engine_errors(config: Config) -> list[str]:
    """List what does not go together with engines of evaluation's own."""
    run, evaluation = config.run, config.eval
    if not evaluation.eval_num_gpus:
        return []
    flag = f"--eval-num-gpus {evaluation.eval_num_gpus}"
    if run.mode == "eval":
        return [f"{flag}: in --mode eval all engines evaluate; give --rollout-num-gpus"]
    if run.mode != "rl":
        return [f"{flag}: no engine evaluates in --mode {run.mode}; leave it out"]
    for name in ("debug_rollout_only", "debug_train_only"):
        if getattr(run, name):
            return [f"{flag}: with --{name.replace('_', '-')} nothing is evaluated; leave one out"]
    errors = []
    if config.cluster.colocate:
        errors.append(
            f"{flag}: with --colocate engines and trainers share their devices and work in turn, so evaluation has"
            " the engines to itself; leave one out"
        )
    if not evaluation.has_sets or (evaluation.eval_interval is None and evaluation.skip_eval_before_train):
        errors.append(f"{flag}: nothing is evaluated; give --eval-prompt-data (or --eval-config) and --eval-interval")
    if config.weights.update_weight_transport == "ipc":
        errors.append(
            f"{flag}: --update-weight-transport ipc reaches engines on the trainers' devices alone; take broadcast or"
            " disk"
        )
    if config.checkpoint.keep_best is not None:
        errors.append(
            f"{flag}: its results come after a checkpoint is saved, too late for --keep-best"
            f" {config.checkpoint.keep_best}; leave one out"
        )
    return errors
