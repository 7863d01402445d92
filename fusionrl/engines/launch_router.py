"""Start SGLang's router: `python -m fusionrl.engines.launch_router <the router's arguments>`.

The only difference to `python -m sglang_router.launch_router` is that the API key comes from the
environment, as a command line can be read by every user of the machine.
"""

from __future__ import annotations

import os
import sys

API_KEY_VARIABLE = "FUSIONRL_ENGINE_API_KEY"


def main(argv: list[str]) -> None:
    """Parse the router's arguments and route until a signal ends the process."""
    api_key = os.environ.pop(API_KEY_VARIABLE, None)
    if api_key is not None:
        argv = [*argv, "--api-key", api_key]

    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
