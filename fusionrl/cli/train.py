"""`fusionrl train`: check the flags, then run."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from fusionrl.checks.warnings import flag_warnings
from fusionrl.cli.ending import ending
from fusionrl.cli.exits import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USER, refuse
from fusionrl.cli.plan import print_plan
from fusionrl.cli.resolve import resolve, resume_lines
from fusionrl.config.config import Config
from fusionrl.config.parser import CommandLineError, build_parser
from fusionrl.config.plan_flags import take_plan_flags
from fusionrl.plan.plan import Plan
from fusionrl.plan.render import memory_warnings, render_plan


def run(argv: Sequence[str]) -> int:
    """Run what the flags describe, or with --dry-run print its plan; returns the exit code."""
    if {"-h", "--help"} & set(argv):
        build_parser().print_help()
        return 0
    of_plan, argv, _ = take_plan_flags(argv)
    if of_plan:
        return refuse(f"{flag}: it belongs to `fusionrl plan`, which starts nothing; leave it out" for flag in of_plan)
    try:
        config, plan = resolve(argv)
    except CommandLineError as error:
        return refuse(error.errors)
    if config.run.dry_run:
        print_plan(config, plan)
        return 0
    return run_command(config, plan)


def run_command(config: Config, plan: Plan) -> int:
    """Run a resolved configuration in its folder; whatever goes wrong is said last, in one message."""
    # Ray and the rest of the stack are imported only now, when the command line has been found good.
    from fusionrl.observe.log import quiet_libraries, setup_logging
    from fusionrl.observe.progress import Progress
    from fusionrl.observe.run_dir import RunDir, umask_of

    path = Path(config.run.run_dir or f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        os.umask(umask_of(config.run.run_dir_mode))  # of every file of the run: its processes inherit it
        run_dir = RunDir(path, resume=config.run.resume, mode=int(config.run.run_dir_mode, 8))
    except (ValueError, OSError) as error:
        return refuse([str(error) if isinstance(error, ValueError) else f"--run-dir: {error}"])
    failure: BaseException | None = None
    code = 0
    with run_dir:
        changes = resume_lines(config, plan)  # against the configuration before this one
        run_dir.write_config(config.to_file())
        warnings = flag_warnings(config)
        run_dir.write_plan(render_plan(plan, config, warnings))
        log_file = run_dir.logs / "driver.log"
        with Progress(max(1, plan.num_rollout), config.run.mode) as progress:
            setup_logging(config.run.log_level, log_file, role="driver", console=progress.print)
            progress.print(f"run folder {path}")
            for text in changes:
                progress.print(f"--resume: {text}")
            for text in [*memory_warnings(plan), *warnings]:
                logging.getLogger("fusionrl").warning("%s", text)
            try:
                from fusionrl.driver.run import run_training

                quiet_libraries()
                run_training(config, plan, path, run_dir.attempt, progress)
            except BaseException as raised:  # the last stop of every error: it becomes the exit code and message
                failure = raised
                logging.getLogger("fusionrl").debug("the run failed", exc_info=True)
                with log_file.open("a", encoding="utf-8") as log:
                    log.write("".join(traceback.format_exception(raised)))
    if failure is not None:
        code, message = explain(failure)
        if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            message += ending(config, path, run_dir.attempt)
        print(f"{message}\nlogs: {run_dir.logs}/ (this error in full: {log_file})", file=sys.stderr)
    else:
        print(f"done: {path}")
    return code


def explain(error: BaseException) -> tuple[int, str]:
    """Exit code and message of the error that ended a run: the cause, out of Ray's wrapping."""
    from fusionrl.cluster.ray_cluster import root_cause
    from fusionrl.driver.signals import Terminated

    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if isinstance(error, Terminated):
        return EXIT_TERMINATED, "terminated by SIGTERM"
    cause = root_cause(error)
    if isinstance(cause, ValueError):
        return EXIT_USER, f"error: {cause}"
    return EXIT_FAILURE, f"failed: {type(cause).__name__}: {cause}"
