"""`fusionrl doctor [flags of train]`: examine the machine and a command line before a run; nothing is started."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict
from typing import TYPE_CHECKING

from fusionrl.cli.exit_codes import EXIT_USER, refuse
from fusionrl.config.parser import CommandLineError, read_args

if TYPE_CHECKING:
    from fusionrl.checks.doctor.examine import Examined
    from fusionrl.config.config import Config

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
    from fusionrl.cli.doctor_nodes import cluster_findings

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
    from fusionrl.checks.warnings import flag_warnings
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
