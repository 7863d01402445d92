"""`fusionrl plan`: check the flags of a run and print its plan; nothing is started."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from fusionrl.base.wording import attempt
from fusionrl.checks.hub import HubError, find_model, is_model_name
from fusionrl.checks.validate import elsewhere_errors, flag_warnings, run_warnings
from fusionrl.cli import refuse
from fusionrl.cli.resolve import not_named_yet, resolve, resume_lines
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import sees_images
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import CommandLineError, build_parser, read_args
from fusionrl.models.quantization import BlockFp8, read_described
from fusionrl.models.shape import ModelShape
from fusionrl.plan.cluster import Cluster, cluster_errors, not_checked, on_cluster
from fusionrl.plan.plan import Plan, make_plan, plan_errors
from fusionrl.plan.render import render_plan
from fusionrl.plan.trainer_plan import lr_decay_steps


def run(argv: Sequence[str]) -> int:
    """Print the plan, for this machine or for a cluster elsewhere; returns the exit code."""
    if {"-h", "--help"} & set(argv):
        build_parser("fusionrl plan").print_help()
        return 0
    try:
        config, errors = read_args(argv, "fusionrl plan")
        if config.planning.cluster is not None:
            return plan_elsewhere(config, config.planning.cluster, errors)
        config, plan = resolve(argv, for_plan=True)
    except CommandLineError as error:
        return refuse(error.errors)
    print_plan(config, plan)
    return 0


def print_plan(config: Config, plan: Plan) -> None:
    """Print the plan, and with --resume the flags that differ from the run's."""
    print(render_plan(plan, config, run_warnings(config, plan)), end="")
    for text in resume_lines(config, plan):
        print(f"resume     {text}")


def plan_elsewhere(config: Config, cluster_flag: str, errors: list[str]) -> int:
    """Print the plan for a cluster elsewhere, and what could not be checked; returns the exit code.

    `errors`: of reading the flags. Raises CommandLineError with these, and every mistake that flags and config.json
    show.
    """
    cluster = attempt(errors, lambda: Cluster.parse(cluster_flag))
    if cluster is not None:
        config = attempt(errors, partial(on_cluster, config, cluster)) or config
    shape, quantization = attempt(errors, partial(_shape, config.model.hf_checkpoint, sees_images(config))) or (
        None,
        None,
    )
    if config.run.mode == "eval":
        quantization = None  # as for a run here: engines alone load what the files have
    original = config
    # These flags name folders of the cluster; other trainers than the actor's are taken for models of its shape.
    # A copy that sets a field counts as given by the user, so only what is there is taken out.
    if config.critic.critic_load is not None:
        config = config.changed(critic_load=None)
    if config.prm.prm_load is not None:
        config = config.changed(prm_load=None)
    new_errors = elsewhere_errors(config, shape)
    if config.run.num_epoch is not None and config.run.num_rollout is None:
        # The prompts are elsewhere: the number of steps is not known.
        config = config.changed(num_epoch=None)
    new_errors += plan_errors(config, 0, shape, "cuda") if cluster else []
    errors += not_named_yet(new_errors, errors)
    if errors or shape is None or cluster is None:
        raise CommandLineError(errors)
    config = _with_scorers(config)
    make = partial(make_plan, config, shape, device="cuda", num_prompts=0, machine=cluster.machine)
    plan = attempt(errors, partial(make, quantization=quantization))
    if plan is None:
        raise CommandLineError(errors)
    if plan.layout is not None and config.run.num_rollout is not None:
        attempt(errors, partial(lr_decay_steps, config.train, plan.num_optimizer_steps))
    if errors := errors or cluster_errors(cluster, plan.num_bundles):
        raise CommandLineError(errors)
    print(f"cluster    {cluster.describe()}")
    print(render_plan(plan, config, flag_warnings(config)), end="")
    unread = {scorer.role for scorer in plan.scorers if scorer.shape is None}
    print(f"not checked: {', '.join(not_checked(original, unread))}")
    return 0


def _shape(folder: str | None, sees: bool) -> tuple[ModelShape, BlockFp8 | None]:
    if folder is not None and is_model_name(folder):
        folder = find_model(folder, "--hf-checkpoint", only_config=True)
    if folder is None:
        raise ValueError("--hf-checkpoint is required: a config.json, or a folder that has one")
    return read_described(folder, sees=sees)


def _with_scorers(config: Config) -> Config:
    """The configuration with folders in place of the Hub's names of reward model and teacher, for their config.json.

    A name that cannot be had stays: its memory is then not estimated.
    """
    for field in ("rm_model", "opd_teacher_load"):
        name = config.value(field)
        if name is not None and is_model_name(name):
            with suppress(HubError):
                config = config.changed(**{field: find_model(name, flag_of(field), only_config=True)})
    return config
