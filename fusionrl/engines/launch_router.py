"""Start SGLang's router: `python -m fusionrl.engines.launch_router <the router's arguments>`.

The only difference to `python -m sglang_router.launch_router` is that the API key comes by standard input, as every
user of the machine can read a command line, and every process of the same user the environment.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> None:
    """Parse the router's arguments and route until a signal ends the process."""
    api_key = sys.stdin.read()
    if api_key:
        argv = [*argv, "--api-key", api_key]

    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
