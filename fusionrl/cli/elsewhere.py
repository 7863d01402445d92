"""`fusionrl plan --cluster …`: the plan for a cluster elsewhere, from a config.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fusionrl.checks.collect import attempt
from fusionrl.checks.hub import find_model, is_model_name
from fusionrl.checks.validate import validate_flags
from fusionrl.checks.warnings import flag_warnings
from fusionrl.cli.resolve import not_named_yet
from fusionrl.config.parser import CommandLineError, read_args
from fusionrl.config.plan_flags import imbalance_of
from fusionrl.models.shape import ModelShape
from fusionrl.plan.cluster import Cluster, cluster_errors, not_checked, on_cluster, read_shape
from fusionrl.plan.plan import make_plan, plan_errors
from fusionrl.plan.render import render_plan
from fusionrl.plan.schedule import lr_decay_steps


def plan_elsewhere(argv: Sequence[str], plan_flags: dict[str, str]) -> int:
    """Print the plan for a cluster elsewhere, and what could not be checked; returns the exit code.

    Args:
        argv: the command line without `plan_flags`.
        plan_flags: values of PLAN_FLAGS.

    Raises:
        CommandLineError: every mistake that flags and config.json show.
    """
    config, errors = read_args(argv, "fusionrl plan")
    cluster = attempt(errors, lambda: Cluster.parse(plan_flags["--cluster"]))
    if cluster is not None:
        config = attempt(errors, partial(on_cluster, config, cluster)) or config
    imbalance = attempt(errors, lambda: imbalance_of(plan_flags)) or 1.0
    shape = attempt(errors, partial(_shape, config.model.hf_checkpoint))
    unchecked = not_checked(config)
    # What these name are folders of the cluster; trainers beside the actor's are taken for models of its shape.
    # A copy that sets a field counts as given by the user, so only what is there is taken out.
    if config.critic.critic_load is not None:
        config = config.model_copy(update={"critic": config.critic.model_copy(update={"critic_load": None})})
    if config.prm.prm_load is not None:
        config = config.model_copy(update={"prm": config.prm.model_copy(update={"prm_load": None})})
    found = validate_flags(config, shape) + (plan_errors(config, 0, shape) if cluster else [])
    errors += not_named_yet(found, errors)
    if errors or shape is None or cluster is None:
        raise CommandLineError(errors)
    try:
        plan = make_plan(config, shape, device="cuda", num_prompts=0, machine=cluster.machine, imbalance=imbalance)
    except ValueError as error:
        raise CommandLineError([str(error)]) from error
    if plan.layout is not None and config.run.num_rollout is not None:
        try:
            lr_decay_steps(config.train, plan.num_optimizer_steps)
        except ValueError as error:
            raise CommandLineError([str(error)]) from error
    if too_large := cluster_errors(cluster, plan.num_bundles):
        raise CommandLineError(too_large)
    print(f"cluster    {cluster.describe()}")
    print(render_plan(plan, config, flag_warnings(config)), end="")
    print(f"not checked: {', '.join(unchecked)}")
    return 0


def _shape(folder: str | None) -> ModelShape:
    if folder is not None and is_model_name(folder):
        folder = find_model(folder, "--hf-checkpoint", only_config=True)
    return read_shape(folder)
