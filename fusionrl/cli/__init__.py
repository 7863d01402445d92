"""The command `fusionrl`. Only the module of the command that is given is imported."""

import io
import os
import select
import sys
from collections.abc import Iterable, Sequence
from pkgutil import resolve_name

from fusionrl import __version__
from fusionrl.base.environment import hide_passwords
from fusionrl.base.wording import closest

EXIT_USER, EXIT_FAILURE, EXIT_TERMINATED, EXIT_INTERRUPTED = 2, 1, 143, 130

USAGE = """usage: fusionrl COMMAND [flags]

  fusionrl train --mode rl|sft|reject-sampling|eval …   run
  fusionrl plan  …                                      check the same flags, print the plan, start nothing
  fusionrl plan --cluster 8x8xh200 …                    the same for GPUs elsewhere, from a config.json
  fusionrl doctor [flags]                               examine machine, model, data, reward; cures
  fusionrl show [RUN] [--step N] [--worst] …            samples of a run, with rewards and advantages
  fusionrl view [RUN …] [--html FILE] …                 a run as one HTML file; one sample with coloured tokens
  fusionrl diff RUN_A RUN_B [--weights]                 where two runs part: step, sample, token, metric; flags
  fusionrl timeline [RUN] [--out FILE] …                what each process did, and when, for Perfetto; where time went
  fusionrl track [RUN] --to wandb …                     metrics of a run in a tracker, also of a live run
  fusionrl report [RUN] [--with-samples]                the evidence of a failure in one file, without keys and samples
  fusionrl export FROM OUT [--merge] …                  an adapter as a PEFT folder, or added to its base model
  fusionrl engines add|remove|list --run-dir RUN …      engines of others join a run and leave it
  fusionrl data check FILE… [flags]                     read prompt data, say all that is wrong with it
  fusionrl flags                                        the flag reference, as Markdown
  fusionrl flags --template                             a commented file of all flags, for --config
  fusionrl from-slime SCRIPT                            the command that does what a launch script of slime's does
  fusionrl metrics [NAME]                               what each metric is: all as Markdown, or those named so

`fusionrl train --help` and `fusionrl show --help` list the flags."""


# Command → its function (argv) -> exit code.
COMMANDS: dict[str, str] = {
    "train": "fusionrl.cli.train:run",
    "plan": "fusionrl.cli.plan:run",
    "doctor": "fusionrl.cli.doctor:run",
    "show": "fusionrl.observe.show:main",
    "view": "fusionrl.observe.view.command:main",
    "diff": "fusionrl.cli.diff:run",
    "timeline": "fusionrl.observe.timeline.command:main",
    "track": "fusionrl.observe.track:main",
    "report": "fusionrl.cli.report:run",
    "export": "fusionrl.cli.export:run",
    "engines": "fusionrl.cli.engines:run",
    "data": "fusionrl.cli.data:run",
    "flags": "fusionrl.config.parser:main",
    "from-slime": "fusionrl.compat.slime.command:run",
    "metrics": "fusionrl.observe.glossary:main",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 for a user's mistake, 1 for a failure."""
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and args[:1] != ["from-slime"]:  # which prints a script
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack a model's characters
    try:
        exit_code = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # of `fusionrl flags | head`: the reader has enough
        is_run = args[:1] == ["train"] and "--help" not in args
        if is_run or not _has_lost_its_reader(sys.stdout.fileno()):  # the pipe of another process
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        return 0
    return exit_code


def _has_lost_its_reader(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(args: list[str]) -> int:
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command not in COMMANDS:
        close = closest(command, COMMANDS)
        hint = f"; did you mean `fusionrl {close}`?" if close else ""
        print(f"error: unknown command {command!r}{hint}\n\n{USAGE}", file=sys.stderr)
        return EXIT_USER
    try:
        exit_code: int = resolve_name(COMMANDS[command])(rest)
    except ValueError as error:
        if not COMMANDS[command].startswith("fusionrl.observe."):
            raise
        return refuse([str(error)])
    return exit_code


def refuse(errors: Iterable[str]) -> int:
    """Print the mistakes, one line each, and return the exit code of a user's mistake."""
    for error in errors:
        print(f"error: {hide_passwords(error)}", file=sys.stderr)
    return EXIT_USER
