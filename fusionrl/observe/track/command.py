"""`fusionrl track`: flags, and the sending of what is new."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from fusionrl.base.environment import hide_passwords
from fusionrl.observe.metrics import METRICS_FILE, read_lines
from fusionrl.observe.run_dir import is_running, last_config
from fusionrl.observe.show import find_run
from fusionrl.observe.track.adapters import ADAPTERS, Target, flat_config, open_tracker
from fusionrl.observe.track.send import Sender, SentPart, SentState, TrackerError, say_who_holds, until_stopped

LIVE = frozenset({"prometheus"})  # they hold the newest values alone
_ADDRESS_SENDS = frozenset({"mlflow", "trackio"})  # their --address is a place elsewhere, also with --offline
EXIT_FAILED = 1

_HELP = """Send the metrics of a run to an experiment tracker: afterwards, or with --follow while it goes on. What was
sent is remembered in the run's folder (trackers.json): the command sends what is new, also of a resumed run."""


def main(argv: Sequence[str]) -> int:
    """`fusionrl track [RUN] --to TRACKER …`; returns the exit code, 1 if the tracker fails."""
    options = _parser().parse_args(argv)
    run = find_run(options.run)
    if options.to in LIVE and not options.follow:
        raise ValueError(f"--to {options.to} shows a live run: give --follow")
    if not (run / METRICS_FILE).is_file() and not (options.follow and is_running(run)):
        raise ValueError(f"{run} has no {METRICS_FILE}: no step is finished yet, or it is not a run folder")
    if options.offline and options.address and options.to in _ADDRESS_SENDS:
        raise ValueError(f"--offline with --address: --to {options.to} sends to an address; leave one of the two out")
    try:
        count = _send(run, options)
    except TrackerError as error:
        print(f"error: {hide_passwords(str(error))}", file=sys.stderr)  # a tracker's own words may hold its address
        return EXIT_FAILED
    print(f"{run}: {count:,} lines sent to {options.to}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fusionrl track", description=_HELP)
    parser.add_argument("run", metavar="RUN", nargs="?", help="run folder; default: the newest one under runs/")
    parser.add_argument(
        "--to", choices=list(ADAPTERS), required=True, help="the tracker; its package must be installed"
    )
    parser.add_argument("--project", default="fusionrl", help="project (MLflow: experiment); default: fusionrl")
    parser.add_argument("--name", help="name of the run there; default: that of its folder")
    parser.add_argument("--offline", action="store_true", help="write the tracker's files into the run's folder only")
    parser.add_argument(
        "--address",
        default="",
        help="of the server (wandb, mlflow), the folder (tensorboard, swanlab), the Space (trackio), or HOST:PORT"
        " (prometheus)",
    )
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--again", action="store_true", help="send everything, as a new run there")
    return parser


def _send(run: Path, options: argparse.Namespace) -> int:
    """Send what is new; return the number of lines."""
    key = f"{options.to} {options.project}" + (" offline" if options.offline else "") + f" {options.address}".rstrip()
    with nullcontext() if options.to in LIVE else closing(SentState(run, key)) as memory:
        sent = SentPart() if memory is None or options.again else memory.read()
        if not options.follow and not read_lines(run, sent.bytes):
            return 0  # a run of the tracker is not opened for nothing
        target = Target(
            folder=run,
            project=options.project,
            name=options.name or run.resolve().name,
            run_id=sent.run_id,
            is_new=sent.is_new,
            config=flat_config(last_config(run) or {}),
            offline=options.offline,
            address=options.address,
        )
        if options.follow:
            say_who_holds(run)
        with until_stopped():
            tracker = open_tracker(options.to, target)
            return Sender(run, options.to, tracker, sent, memory).send(options.follow)
