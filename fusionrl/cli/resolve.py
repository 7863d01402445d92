"""From a command line to a checked configuration and its plan. All mistakes are found before anything starts."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from fusionrl.base.imports import quiet
from fusionrl.base.wording import attempt
from fusionrl.checks.bitwise import bitwise_errors
from fusionrl.checks.hub import resolve_names
from fusionrl.checks.outputs import (
    export_errors,
    first_start_warning,
    profile_errors,
    profile_plan_errors,
    resume_folder_errors,
)
from fusionrl.checks.validate import validate
from fusionrl.cli.device import detect_device
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import CommandLineError, read_command_line
from fusionrl.config.resume_differences import difference_lines
from fusionrl.config.run import PlanGroup
from fusionrl.observe.run_dir import last_config
from fusionrl.plan.devices import this_machine
from fusionrl.plan.placement import check_fused_layers
from fusionrl.plan.plan import Plan, make_plan, plan_errors
from fusionrl.plan.trainer_plan import auxiliary_config, lr_decay_steps

_FLAG = re.compile(r"--[a-z][\w-]*")


def not_named_yet(found: Iterable[str], errors: Iterable[str]) -> list[str]:
    """Return those of `found` that name no flag of `errors`: a check that builds on a bad flag has nothing new."""
    named = {flag for error in errors for flag in _FLAG.findall(error)}
    return [error for error in found if not named.intersection(_FLAG.findall(error))]


def resolve(argv: Sequence[str], *, for_plan: bool = False) -> tuple[Config, Plan]:
    """Return the checked configuration of a command line, and its plan. `for_plan`: of the command `fusionrl plan`.

    Raises CommandLineError with every mistake that can be known before anything starts.
    """
    config, errors, notes, file = read_command_line(argv)
    if not for_plan and (of_plan := [name for name in config.given() if name in PlanGroup.model_fields]):
        cure = "it belongs to `fusionrl plan`, which starts nothing; leave it out"
        raise CommandLineError([f"{flag_of(name)}: {cure}" for name in of_plan])
    if config.run.resume and (of_folder := resume_folder_errors(config, file)):
        raise CommandLineError(errors + of_folder)  # most flags may be those of the folder's run
    for note in notes:
        print(note, file=sys.stderr)
    config, unavailable = resolve_names(config)
    errors += unavailable
    checked, found = validate(config)
    device = attempt(found, lambda: detect_device(config.cluster.device)) or "cpu"
    found += profile_errors(config, device)
    found += plan_errors(config, checked.num_prompts, checked.shape, device)
    errors += not_named_yet(found, errors)
    for text in (*checked.data_warnings, *filter(None, [first_start_warning(config)])):
        print(f"warning: {text}", file=sys.stderr)
    if errors or checked.shape is None:
        raise CommandLineError(errors)
    make = partial(
        make_plan,
        config,
        checked.shape,
        device=device,
        num_prompts=checked.num_prompts,
        num_cores=len(os.sched_getaffinity(0)),
        quantization=checked.quantization,
        machine=this_machine(device),
        sandbox=checked.sandbox,
    )
    plan = attempt(errors, make)
    if plan is None:
        raise CommandLineError(errors)
    errors = profile_plan_errors(config, plan) + bitwise_errors(config, plan) or trainer_errors(config, plan)
    if config.run.num_rollout is None:  # else `output_errors` has looked
        errors += export_errors(config, plan.num_rollout)
    if config.run.resume and not errors:
        from fusionrl.runtime.checkpoints import resume_errors

        errors = resume_errors(config, plan)
    if errors:
        raise CommandLineError(errors)
    return config, plan


def resume_lines(config: Config, plan: Plan) -> list[str]:
    """List the flags in which a resume differs from its run, each with both values; say if the run is at its end."""
    former = last_config(Path(config.run.run_dir)) if config.run.resume and config.run.run_dir else None
    if former is None:
        return []
    from fusionrl.runtime.checkpoints import nothing_left

    end = nothing_left(config, plan)
    lines = difference_lines(former, config, None if end else plan.num_optimizer_steps)
    return [*lines, end] if end else lines


def trainer_errors(config: Config, plan: Plan) -> list[str]:
    """List what trainers would refuse at start: schedules, and with flags passed to Megatron its checks."""
    if plan.layout is None:
        return []
    groups = [("", config, plan.trainer_plan(), plan.shape)]
    if plan.auxiliary is not None:
        role = plan.auxiliary.role
        groups.append((f"{role}-", auxiliary_config(config, role), plan.trainer_plan(role), plan.auxiliary.shape))
    errors: list[str] = []
    fused_version: str | None = None
    with suppress(metadata.PackageNotFoundError):
        fused_version = metadata.version("transformer_engine")
    passed = config.passthrough
    for prefix, part, own, shape in groups:
        attempt(errors, partial(lr_decay_steps, part.train, own.num_steps, prefix))
        attempt(errors, partial(check_fused_layers, part, shape, plan.device, own.precision, fused_version))
        if passed.transformer or passed.optimizer or passed.ddp:
            # Only now: the import takes seconds, unless the flags' types were asked for.
            with quiet():
                from fusionrl.checks.model import megatron_errors

                errors += megatron_errors(part, shape, own)
    return list(dict.fromkeys(errors))
