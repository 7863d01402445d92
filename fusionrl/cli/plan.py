"""`fusionrl plan`: check the flags of a run and print its plan; nothing is started."""

from collections.abc import Sequence

from fusionrl.checks.warnings import run_warnings
from fusionrl.cli.exit_codes import refuse
from fusionrl.cli.resolve import resolve, resume_lines
from fusionrl.config.config import Config
from fusionrl.config.parser import CommandLineError, build_parser
from fusionrl.config.passed_flags import PLAN_FLAGS, take_plan_flags
from fusionrl.plan.plan import Plan
from fusionrl.plan.render import render_plan


def run(argv: Sequence[str]) -> int:
    """Print the plan, for this machine or for a cluster elsewhere; returns the exit code."""
    if {"-h", "--help"} & set(argv):
        build_parser("fusionrl plan").print_help()
        print("\nflags of `fusionrl plan` alone:")
        for flag, (values, _, text) in PLAN_FLAGS.items():
            print(f"  {flag} {values}\n        {text}")
        return 0
    of_plan, argv, errors = take_plan_flags(argv)
    if errors:
        return refuse(errors)
    try:
        if "--cluster" in of_plan:
            from fusionrl.cli.plan_cluster import plan_elsewhere

            return plan_elsewhere(argv, of_plan)
        config, plan = resolve(argv, of_plan)
    except CommandLineError as error:
        return refuse(error.errors)
    print_plan(config, plan)
    return 0


def print_plan(config: Config, plan: Plan) -> None:
    """Print the plan, and with --resume the flags that differ from the run's."""
    print(render_plan(plan, config, run_warnings(config, plan)), end="")
    for text in resume_lines(config, plan):
        print(f"resume     {text}")
