"""Start SGLang's router: `python -m fusionrl.engines.launch_router <the router's arguments>`.

There are two differences to `python -m sglang_router.launch_router`. The API key comes by standard input, as every user
of the machine can read a command line, and every process of the same user the environment. And the small load balancer
in Python, which imports SGLang and torch, is imported only with `--mini-lb`: 2 s of a core.
"""

import sys
import types

from fusionrl.base.process import answer_with_stacks

_BALANCER = "sglang_router.mini_lb"


def main(argv: list[str]) -> None:
    """Parse the router's arguments and route until a signal ends the process."""
    answer_with_stacks()
    api_key = sys.stdin.read()
    if api_key:
        argv = [*argv, "--api-key", api_key]

    if "--mini-lb" not in argv:
        without = types.ModuleType(_BALANCER)
        without.MiniLoadBalancer = None  # type: ignore[attr-defined]  # called only with that flag
        sys.modules[_BALANCER] = without
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
