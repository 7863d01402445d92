"""`fusionrl doctor [flags of train]`: examine the machine and a command line before a run; nothing is started."""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.base.wording import existing_parent
from fusionrl.cli import EXIT_USER, refuse
from fusionrl.config.parser import CommandLineError, read_args

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fusionrl.checks.doctor.examine import Examined
    from fusionrl.checks.doctor.findings import Finding
    from fusionrl.config.config import Config
    from fusionrl.runtime.ray_cluster import NodeActors

_USAGE = """usage: fusionrl doctor [--json] [--deep] [--gold FORM] [flags of `fusionrl train`]

Examine this machine, and with flags also the run that they describe: packages, limits, memory, disks, network, flags,
data, tokenizer, chat template, end tokens, and the reward on three rows: the gold label must score above an empty
answer. With --ray-address also each node of the cluster, by a small actor for some seconds; nothing else is started.
Each line has a status (ok, warn, FAULT), a fact and, but for ok, a cure.

  --json       the findings as a JSON list of objects with check, status (fact, warning, fault), fact, cure
  --deep       also import the whole stack and read all weights: a minute
  --gold FORM  the form in which your reward wants an answer, such as 'FINAL: {label}'

Exit code 2: there is a fault. docs/guides/check.md has each check."""


_OF_A_CLUSTER = frozenset({"--ray-address", "--allow-open-ray", "--device", "--run-dir"})
"""Flags that say nothing about a run: with these alone, machines are looked at."""


def run(argv: Sequence[str]) -> int:
    """Print the findings; returns the exit code: 2 where there is a fault."""
    if {"-h", "--help"} & set(argv):
        print(_USAGE)
        return 0
    parser = argparse.ArgumentParser("fusionrl doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--gold", metavar="FORM")
    if "--gold" in argv:  # joined with its form: argparse takes one that begins with "-" for a flag
        at = list(argv).index("--gold")
        argv = [*argv[:at], "--gold=" + "".join(argv[at + 1 : at + 2]), *argv[at + 2 :]]
    options, rest = parser.parse_known_args(argv)
    if options.gold is not None and "{label}" not in options.gold:
        return refuse(
            [f"--gold {options.gold}: the form of an answer needs {{label}} in it, such as 'FINAL: {{label}}'"]
        )
    from fusionrl.checks.doctor.examine import Options, examine
    from fusionrl.checks.doctor.findings import has_fault, summary

    examined = _examined(rest)
    findings = examine(examined, Options(deep=options.deep, gold=options.gold))
    if not any(finding.check == "ray" and finding.status == "fault" for finding in findings):
        findings += cluster_findings(examined)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        for finding in findings:
            print(finding.line())
        print(summary(findings))
    return EXIT_USER if has_fault(findings) else 0


def _examined(argv: Sequence[str]) -> Examined:
    from fusionrl.base.wording import attempt
    from fusionrl.checks.doctor.examine import Examined
    from fusionrl.checks.validate import flag_warnings
    from fusionrl.cli.device import detect_device
    from fusionrl.cli.resolve import resolve
    from fusionrl.plan.render import open_file_warnings

    config: Config | None
    if not argv:
        return Examined(None, None, (), (), detect_device("auto"))
    if {token.partition("=")[0] for token in argv if token.startswith("--")} <= _OF_A_CLUSTER:
        config, errors = read_args(argv)
        device_flag = config.cluster.device
        device = attempt(errors, lambda: detect_device(device_flag))
        return Examined(config, None, errors, (), device or "cpu")
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            config, plan = resolve(argv)
    except CommandLineError as error:
        errors = list(error.errors)
        try:
            config = read_args(argv)[0]
        except CommandLineError:  # no file of --config, as `errors` says: the machine alone can be looked at
            config = None
        messages: list[str] = []
        device = attempt(messages, lambda: detect_device("auto" if config is None else config.cluster.device))
        errors += [message for message in messages if message not in errors]
        return Examined(config, None, errors, _warnings(output.getvalue()), device or "cpu")
    warnings = [*_warnings(output.getvalue()), *flag_warnings(config), *open_file_warnings(config, plan)]
    return Examined(config, plan, (), warnings, plan.device)


def _warnings(output: str) -> list[str]:
    """Return the warnings that `resolve` printed for a user of `fusionrl train`."""
    return [line.removeprefix("warning: ") for line in output.splitlines() if line.startswith("warning: ")]


def cluster_findings(examined: Examined) -> list[Finding]:
    """Join the cluster and examine its nodes; nothing without --ray-address."""
    config = examined.config
    if config is None or config.cluster.ray_address is None:
        return []
    from fusionrl.checks.doctor.findings import has_fault, of_messages
    from fusionrl.checks.doctor.nodes import (
        NodeDoctor,
        Order,
        clock_findings,
        device_findings,
        look_findings,
        reach_findings,
    )
    from fusionrl.runtime.ray_cluster import NodeActors

    address, allow_open = config.cluster.ray_address, config.cluster.allow_open_ray
    try:
        with ExitStack() as stack:
            every = stack.enter_context(NodeActors(NodeDoctor, examined.device, address, allow_open=allow_open))
            displayed, paths, unknown = _shared(examined, stack)
            findings = device_findings({node.name: node.num_devices for node in every.nodes}, examined.plan) + unknown
            own_node = next(node.name for node in every.nodes if node.is_own)
            looks: Mapping[str, Any] = every.ask("look", Order(examined.plan, examined.device, paths))
            findings += look_findings(looks, own_node, displayed)
            every.nodes = [node for node in every.nodes if not isinstance(looks[node.name], Exception)]
            if len(every.nodes) > 1:
                ways = reach_findings(_ways(every))
                findings += ways + clock_findings(_offsets(every))
                if not has_fault(ways):
                    findings += _collective(every)
            return findings
    except ValueError as error:  # the cluster cannot be joined
        return of_messages("ray", "fault", [str(error)])


def _shared(examined: Examined, stack: ExitStack) -> tuple[dict[str, str], dict[str, str], list[Finding]]:
    """Return folders that all nodes must see, by flag, the paths to look for, and what cannot be looked at.

    The folder of the run counts where a flag names it, or a run is planned, which has one in any case.
    """
    from fusionrl.checks.doctor.findings import warning

    assert examined.config is not None
    run_dir_flag, model = examined.config.run.run_dir, examined.config.model.hf_checkpoint
    displayed, paths = dict[str, str](), dict[str, str]()
    findings: list[Finding] = []
    if run_dir_flag is not None or examined.plan is not None:
        run_dir = Path(run_dir_flag or "runs").absolute()
        try:
            paths["--run-dir"] = stack.enter_context(_mark(run_dir))
            displayed["--run-dir"] = str(run_dir)
        except OSError as error:
            text = f"--run-dir {run_dir}: no file can be made there ({error.strerror}) to see if other nodes find it"
            findings = [warning("shared", text, "give a --run-dir in which you may write")]
    if model is not None and Path(model).exists():
        displayed["--hf-checkpoint"] = paths["--hf-checkpoint"] = str(Path(model).absolute())
    return displayed, paths, findings


@contextmanager
def _mark(run_dir: Path) -> Iterator[str]:
    """Make a file in the run's folder, or above it where it is not there yet, for other nodes to see.

    A folder alone tells nothing: each node may have one of this name.
    """
    number, path = tempfile.mkstemp(
        prefix=".fusionrl-doctor-", dir=run_dir if run_dir.is_dir() else existing_parent(run_dir)[0]
    )
    os.close(number)
    try:
        yield path
    finally:
        Path(path).unlink(missing_ok=True)


def _ways(every: NodeActors) -> dict[str, Mapping[str, str] | Exception]:
    """Let every node listen, and connect to every other one: from → to → error."""
    addresses = {node.name: node.address for node in every.nodes}
    answers: Mapping[str, Any] = every.ask_each("listen", {name: (address,) for name, address in addresses.items()})
    ports = {name: (addresses[name], port) for name, port in answers.items() if not isinstance(port, Exception)}
    failed: dict[str, Any] = {
        name: RuntimeError(f"it cannot listen at {addresses[name]}: {error}")
        for name, error in answers.items()
        if name not in ports
    }
    return failed | {name: errors for name, errors in every.ask("reach", ports).items() if name in ports}


def _offsets(every: NodeActors) -> dict[str, tuple[float, float] | Exception]:
    """Return how far each other node's wall clock is ahead, and half of the round trip that asked for it."""
    offsets: dict[str, tuple[float, float] | Exception] = {}
    for node in every.nodes:
        if not node.is_own:
            before = time.time()
            answer: Any = every.ask_each("now", {node.name: ()})[node.name]
            after = time.time()
            is_error = isinstance(answer, Exception)
            offsets[node.name] = answer if is_error else (answer - (before + after) / 2, (after - before) / 2)
    return offsets


def _collective(every: NodeActors) -> list[Finding]:
    """Let all nodes add up a tensor."""
    from fusionrl.checks.doctor.nodes import prepare_findings, reduce_findings

    # All of them first: the time in which the nodes must meet begins with the first one that is ready.
    if findings := prepare_findings(every.ask("prepare")):
        return findings
    first, addresses = every.nodes[0], [node.address for node in every.nodes]
    answers: Mapping[str, Any] = every.ask_each("open_store", {first.name: (first.address, addresses)})
    if not isinstance(port := answers[first.name], Exception):
        calls = {node.name: (rank, addresses, port) for rank, node in enumerate(every.nodes)}
        answers = every.ask_each("all_reduce", calls)
    return reduce_findings(answers)
