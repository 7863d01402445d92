"""The command `fusionrl`: train, plan, show, data check, flags, metrics."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fusionrl import __version__
from fusionrl.base.quiet import quiet
from fusionrl.checks.hub import find_model, is_model_name, resolve_names
from fusionrl.checks.validate import prompt_columns, validate, validate_flags
from fusionrl.checks.warnings import flag_warnings
from fusionrl.config.config import Config
from fusionrl.config.parser import CommandLineError, build_parser, read_args
from fusionrl.config.plan_flags import PLAN_FLAGS, imbalance_of, take_plan_flags
from fusionrl.config.reference import render_reference
from fusionrl.config.template import render_template
from fusionrl.plan.auxiliary import auxiliary_config
from fusionrl.plan.cluster import Cluster, cluster_errors, not_checked, on_cluster, read_shape
from fusionrl.plan.devices import this_machine
from fusionrl.plan.plan import Plan, make_plan, memory_warnings, plan_errors, render_plan
from fusionrl.plan.schedule import lr_decay_steps

USAGE = """usage: fusionrl COMMAND [flags]

  fusionrl train --mode rl|sft|reject-sampling|eval …   run
  fusionrl plan  …                                      check the same flags, print the plan, start nothing
  fusionrl plan --cluster 8x8xh200 …                    the same for GPUs elsewhere, from a config.json
  fusionrl show [RUN] [--step N] [--worst] …            samples of a run, with rewards and advantages
  fusionrl data check FILE… [flags]                     read prompt data, say all that is wrong with it
  fusionrl flags                                        the flag reference, as Markdown
  fusionrl flags --template                             a commented file of all flags, for --config
  fusionrl metrics [NAME]                               what each metric is: all as Markdown, or those named so

`fusionrl train --help` and `fusionrl show --help` list the flags."""

DATA_USAGE = """usage: fusionrl data check FILE… [flags]

FILE is what --prompt-data takes; the flags are those of `fusionrl train`, of which these matter: --mode sft,
--input-key, --label-key, --metadata-key, --tool-key, --apply-chat-template, --apply-chat-template-kwargs, and, to
count tokens, --hf-checkpoint and --rollout-max-prompt-len. Exit code 2: something is wrong."""

_FLAG = re.compile(r"--[a-z][\w-]*")
EXIT_USER, EXIT_FAILURE, EXIT_TERMINATED, EXIT_INTERRUPTED = 2, 1, 143, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 for a user's mistake, 1 for a failure."""
    args = list(sys.argv[1:] if argv is None else argv)
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command == "flags":
        print(render_template() if rest == ["--template"] else render_reference(), end="")
        return 0
    if command == "metrics":
        return explain_metrics(rest)
    if command == "data" and rest[:1] == ["check"] and not {"-h", "--help"} & set(rest):
        try:
            return check_data(rest[1:])
        except CommandLineError as error:
            for line in error.errors:
                print(f"error: {line}", file=sys.stderr)
            return EXIT_USER
    if command == "data":
        print(DATA_USAGE)
        return 0 if {"-h", "--help"} & set(rest) else EXIT_USER
    if command == "show":
        from fusionrl.observe.show import main as show

        return show(rest)
    if command not in ("train", "plan"):
        print(f"error: unknown command {command!r}\n\n{USAGE}", file=sys.stderr)
        return EXIT_USER
    if "-h" in rest or "--help" in rest:
        build_parser().print_help()
        if command == "plan":
            print("\nflags of `fusionrl plan` alone:")
            for flag, (values, _, text) in PLAN_FLAGS.items():
                print(f"  {flag} {values}\n        {text}")
        return 0
    own, rest, flag_errors = take_plan_flags(rest)
    if command == "train":
        flag_errors = [f"{flag}: it belongs to `fusionrl plan`, which starts nothing; leave it out" for flag in own]
    try:
        if flag_errors:
            raise CommandLineError(flag_errors)
        if "--cluster" in own:
            return plan_elsewhere(rest, own)
        config, plan = resolve(rest, own)
    except CommandLineError as error:
        for line in error.errors:
            print(f"error: {line}", file=sys.stderr)
        return EXIT_USER
    if command == "plan" or config.run.dry_run:
        print(render_plan(plan, config, flag_warnings(config)), end="")
        return 0
    return run_command(config, plan)


def plan_elsewhere(argv: Sequence[str], own: dict[str, str]) -> int:
    """`fusionrl plan --cluster …`: print the plan for a cluster elsewhere, and what could not be checked.

    Args:
        argv: the command line without `own`.
        own: values of PLAN_FLAGS.

    Raises:
        CommandLineError: every mistake that flags and config.json show.
    """
    config, errors = read_args(argv, "fusionrl plan")
    shape = cluster = None
    imbalance = 1.0
    try:
        cluster = Cluster.parse(own["--cluster"])
        config = on_cluster(config, cluster)
    except ValueError as error:
        errors.append(str(error))
    try:
        imbalance = imbalance_of(own)
    except ValueError as error:
        errors.append(str(error))
    try:
        folder = config.model.hf_checkpoint
        if folder is not None and is_model_name(folder):
            folder = find_model(folder, "--hf-checkpoint", only_config=True)
        shape = read_shape(folder)
    except ValueError as error:
        errors.append(str(error))
    unchecked = not_checked(config)
    # What these name are folders of the cluster; trainers beside the actor's are taken for models of its shape.
    # A copy that sets a field counts as given by the user, so only what is there is taken out.
    if config.critic.critic_load is not None:
        config = config.model_copy(update={"critic": config.critic.model_copy(update={"critic_load": None})})
    if config.prm.prm_load is not None:
        config = config.model_copy(update={"prm": config.prm.model_copy(update={"prm_load": None})})
    told = {flag for error in errors for flag in _FLAG.findall(error)}
    found = validate_flags(config, shape) + (plan_errors(config, 0, shape) if cluster else [])
    errors += [error for error in found if not told.intersection(_FLAG.findall(error))]
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


def resolve(argv: Sequence[str], own: dict[str, str] | None = None) -> tuple[Config, Plan]:
    """Command line → checked configuration and its plan. `own`: values of PLAN_FLAGS.

    Raises:
        CommandLineError: every mistake that can be known before anything starts.
    """
    config, errors = read_args(argv)
    # A flag that is named in a message already is not complained about again by the checks that build on it.
    config, not_had = resolve_names(config)
    errors += not_had
    told = {flag for error in errors for flag in _FLAG.findall(error)}
    checked, found = validate(config)
    found += plan_errors(config, checked.num_prompts, checked.shape)
    device: Literal["cpu", "cuda"] = "cpu"
    try:
        device = detect_device(config.cluster.device)
    except ValueError as error:
        found.append(str(error))
    imbalance = 1.0
    try:
        imbalance = imbalance_of(own or {})
    except ValueError as error:
        found.append(str(error))
    errors += [error for error in found if not told.intersection(_FLAG.findall(error))]
    for text in checked.data_warnings:
        print(f"warning: {text}", file=sys.stderr)
    if errors or checked.shape is None:
        raise CommandLineError(errors)
    try:
        plan = make_plan(
            config,
            checked.shape,
            device=device,
            num_prompts=checked.num_prompts,
            num_cores=len(os.sched_getaffinity(0)),
            quantization=checked.quantization,
            machine=this_machine(device),
            imbalance=imbalance,
            sandbox=checked.sandbox,
        )
    except ValueError as error:
        raise CommandLineError([str(error)]) from error
    if plan.layout is not None and (refused := trainer_errors(config, plan)):
        raise CommandLineError(refused)
    return config, plan


def explain_metrics(names: Sequence[str]) -> int:
    """`fusionrl metrics [NAME…]`: the page of all metrics as Markdown, or the entries that fit the names."""
    from fusionrl.observe.glossary import describe, render_glossary

    try:
        print("\n".join(map(describe, names)) if names else render_glossary(), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    return 0


def trainer_errors(config: Config, plan: Plan) -> list[str]:
    """List what trainers would refuse at start: schedules, and with flags passed to Megatron its checks."""
    assert plan.layout is not None
    groups = [("", config, plan.layout)]
    if plan.auxiliary is not None:
        role = plan.auxiliary.role
        groups.append((f"{role}-", auxiliary_config(config, role), plan.auxiliary.layout))
    errors: list[str] = []
    passed = config.passthrough
    for prefix, own, layout in groups:
        try:
            lr_decay_steps(own.train, plan.num_optimizer_steps, prefix)
        except ValueError as error:
            errors.append(str(error))
        if passed.transformer or passed.optimizer or passed.ddp:
            # Only now: the import takes seconds, unless the flags' types were asked for.
            with quiet():
                from fusionrl.checks.megatron import megatron_errors

                errors += megatron_errors(own, plan.shape, layout, plan.device)
    return list(dict.fromkeys(errors))


def check_data(argv: Sequence[str]) -> int:
    """`fusionrl data check FILE… [flags]`: print one line a cause, and a summary; 2 if a row cannot be trained on."""
    from fusionrl.data.check import DataCheck

    files = list(itertools.takewhile(lambda token: not token.startswith("-"), argv))
    config, errors = read_args(argv[len(files) :], "fusionrl data check")
    config, not_had = resolve_names(config, with_weights=False)
    errors += not_had
    files = files or config.data.prompt_data or []
    data, folder, is_sft = config.data, config.model.hf_checkpoint, config.run.mode == "sft"
    if not files:
        errors.append(f"no file to check\n\n{DATA_USAGE}")
    if data.rollout_max_prompt_len is not None and folder is None:
        errors.append(f"--rollout-max-prompt-len {data.rollout_max_prompt_len}: counting needs --hf-checkpoint")
    tokenizer = None
    if folder is not None and not errors:
        from fusionrl.data.tokenizer import load_tokenizer

        try:
            with quiet():
                tokenizer = load_tokenizer(folder)
        except (OSError, ValueError) as error:
            errors.append(f"--hf-checkpoint {folder}: its tokenizer cannot be read ({error})")
    if errors:
        for line in errors:
            print(f"error: {line}", file=sys.stderr)
        return EXIT_USER
    check = DataCheck(prompt_columns(config), tokenizer, is_sft, config.data.loss_mask_type)
    num_problems = num_warnings = 0
    for file in files:
        problems, warnings = check.problems(file)
        for text in (*problems, *(f"warning: {warning}" for warning in warnings)):
            print(text)
        num_problems += len(problems)
        num_warnings += len(warnings)
    told = f"{num_problems or 'no'} problem{'s' * (num_problems != 1)}"
    told += f", {num_warnings} warning{'s' * (num_warnings != 1)}" if num_warnings else ""
    print(f"{check.summary()}; {told}")
    return EXIT_USER if num_problems else 0


def detect_device(wanted: str) -> Literal["cpu", "cuda"]:
    """`cpu` or `cuda`; auto asks NVML, which costs milliseconds where torch costs seconds.

    Raises:
        ValueError: --device cuda on a machine without a GPU.
    """
    if wanted == "cpu":
        return "cpu"
    try:
        with quiet():
            import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except ImportError:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False) if _has("nvidia-smi") else None
        count = len(listed.stdout.splitlines()) if listed is not None and listed.returncode == 0 else 0
    except pynvml.NVMLError:
        count = 0
    if wanted == "cuda" and not count:
        raise ValueError("--device cuda: this machine has no NVIDIA GPU; use --device cpu or auto")
    return "cuda" if count else "cpu"


def _has(program: str) -> bool:
    return any(os.access(Path(folder) / program, os.X_OK) for folder in os.get_exec_path())


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
        print(f"error: {error}" if isinstance(error, ValueError) else f"error: --run-dir: {error}", file=sys.stderr)
        return EXIT_USER
    failure: BaseException | None = None
    code = 0
    with run_dir:
        run_dir.write_config(config.model_dump())
        warnings = flag_warnings(config)
        run_dir.write_plan(render_plan(plan, config, warnings))
        log_file = run_dir.logs / "driver.log"
        with Progress(max(1, plan.num_rollout), config.run.mode) as progress:
            setup_logging(config.run.log_level, log_file, role="driver", console=progress.print)
            progress.print(f"run folder {path}")
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


if __name__ == "__main__":
    sys.exit(main())
