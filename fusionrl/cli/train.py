"""`fusionrl train`: check the flags, then run."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.cli import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USER, refuse
from fusionrl.cli.cures import cure_of
from fusionrl.runtime.early_start import EarlyStart

if TYPE_CHECKING:
    from fusionrl.config.config import Config
    from fusionrl.observe.run_dir import RunDir
    from fusionrl.plan.plan import Plan

DRIVER_LOG = "driver.log"  # in logs/


def run(argv: Sequence[str]) -> int:
    """Run what the flags describe, or with --dry-run print its plan; returns the exit code."""
    if "--supervise" in argv:
        from fusionrl.cli.supervise import supervise

        return supervise(argv)
    with EarlyStart() as early_start:
        with suppress(OSError):  # the launcher begins again and tells it
            early_start.prepare(argv)
        # Only now: what reads and checks a command line takes a second to import.
        from fusionrl.config.parser import CommandLineError, build_parser

        if {"-h", "--help"} & set(argv):
            build_parser().print_help()
            return 0
        _begin(early_start, argv)
        from fusionrl.cli.resolve import resolve

        try:
            config, plan = resolve(argv)
        except CommandLineError as error:
            return refuse(error.errors)
        if config.run.supervise:
            return refuse(["--supervise: give it on the command line; a file of --config cannot have it"])
        if config.run.dry_run:
            from fusionrl.cli.plan import print_plan

            print_plan(config, plan)
            return 0
        code = run_command(config, plan, early_start)
    if config.run.in_process and code == EXIT_INTERRUPTED:
        # A thread at a debugger's prompt would hold up the end of this process; children have ended.
        sys.stdout.flush()
        os._exit(code)
    return code


def _begin(early_start: EarlyStart, argv: Sequence[str]) -> None:
    """Begin what the mode needs, if the flags can be read; whatever is wrong is said by the checks or the launcher."""
    from fusionrl.cli.device import detect_device
    from fusionrl.config.parser import CommandLineError, read_args

    # A file that cannot be read, a device that is not there, a full disk: the launcher begins again and tells it.
    with suppress(CommandLineError, ValueError, OSError):
        config, errors = read_args(argv)
        if not errors and not config.run.dry_run:
            early_start.begin(config, detect_device(config.cluster.device))


def run_command(config: Config, plan: Plan, early_start: EarlyStart) -> int:
    """Run a resolved configuration in its folder; whatever goes wrong is said last, in one message.

    `early_start` started already.
    """
    # Ray and the rest of the stack are imported only now, when the command line has been found good.
    from fusionrl.observe.run_dir import RunDir, umask_of
    from fusionrl.observe.spans import stop_recording
    from fusionrl.runtime.ending import Failure, end_message, full_traceback

    path = Path(config.run.run_dir or f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        os.umask(umask_of(config.run.run_dir_mode))  # of every file of the run: its processes inherit it
        run_dir = RunDir(path, resume=config.run.resume, mode=int(config.run.run_dir_mode, 8))
    except (ValueError, OSError) as error:
        return refuse([str(error) if isinstance(error, ValueError) else f"--run-dir: {error}{cure_of(error)}"])
    failure: BaseException | None = None
    log_file = run_dir.logs / DRIVER_LOG
    with run_dir:
        try:
            _run_in(run_dir, config, plan, early_start)
        except BaseException as raised:  # the last stop of every error: it becomes the exit code and message
            failure = raised
            logging.getLogger("fusionrl").debug("the run failed", exc_info=True)
            # A full disk has no room for the log either.
            with suppress(OSError), log_file.open("a", encoding="utf-8") as log:
                log.write(full_traceback(raised))
        finally:
            stop_recording()
    if failure is None:
        print(f"done: {path}")
        return 0
    code, message = explain(failure)
    has_failed = code not in (EXIT_INTERRUPTED, EXIT_TERMINATED)
    text = end_message(config, path, run_dir.attempt)
    if has_failed:
        summary = Failure.of(failure, message, code, config, path, run_dir.attempt)
        message += f"\n{summary.describe()}" + (f"\nthe run ended{text}" if text else "")
        with suppress(OSError):  # as above
            message += f"\nsummary: {summary.write(path)}; the evidence in one file: fusionrl report {path}"
    else:
        message += text
    print(f"{message}\nlogs: {run_dir.logs}/ (this error in full: {log_file})", file=sys.stderr)
    if config.run.pdb and code in (EXIT_FAILURE, EXIT_USER):
        debug(failure)
    return code


def _run_in(run_dir: RunDir, config: Config, plan: Plan, early_start: EarlyStart) -> None:
    """Write what the run is going to do, then run it."""
    from fusionrl.checks.validate import run_warnings
    from fusionrl.cli.resolve import resume_lines
    from fusionrl.observe.logs import quiet_libraries, setup_logging
    from fusionrl.observe.progress import Progress
    from fusionrl.observe.spans import phase, record_to
    from fusionrl.plan.render import memory_warnings, render_plan
    from fusionrl.runtime.checkpoints import saves_at_the_end_only

    changes = resume_lines(config, plan)  # against the configuration before this one
    run_dir.write_config(config.to_file())
    warnings = run_warnings(config, plan)
    run_dir.write_plan(render_plan(plan, config, warnings))
    with Progress(max(1, plan.num_rollout), config.run.mode, is_live=not config.run.in_process) as progress:
        setup_logging(config.run.log_level, run_dir.logs / DRIVER_LOG, role="driver", console=progress.print)
        record_to(run_dir.path, "driver", run_dir.attempt)
        progress.print(f"run folder {run_dir.path}")
        if saves_at_the_end_only(config):
            progress.print("a checkpoint is saved at the end of the run only; --save-interval N: every N steps too")
        for text in changes:
            progress.print(f"--resume: {text}")
        for text in [*memory_warnings(plan), *warnings]:
            logging.getLogger("fusionrl").warning("%s", text)
        with phase("import"):
            from fusionrl.runtime.run import run_training

            quiet_libraries()
        run_training(config, plan, run_dir.path, run_dir.attempt, progress, early_start)


def debug(error: BaseException) -> None:
    """Open the debugger at the line that raised the first of the errors behind `error` (--pdb)."""
    import pdb

    while (cause := error.__cause__ or error.__context__) is not None and cause.__traceback__ is not None:
        error = cause
    print(f"--pdb: {type(error).__name__}: {error}", file=sys.stderr)
    pdb.post_mortem(error.__traceback__)


def explain(error: BaseException) -> tuple[int, str]:
    """Return exit code and message of the error that ended a run: the cause that Ray has wrapped."""
    from fusionrl.runtime.supervisor import Terminated, root_cause

    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if isinstance(error, Terminated):
        return EXIT_TERMINATED, "terminated by SIGTERM"
    cause = root_cause(error)
    if isinstance(cause, ValueError):
        return EXIT_USER, f"error: {cause}"
    return EXIT_FAILURE, f"failed: {type(cause).__name__}: {cause}{cure_of(cause)}"
