"""Hold engines in the middle of a rollout's answers, so that a fault meets answers in part on a machine of any speed.

Engines run `hold` in each forward pass (SGLang's `--forward-hooks`). A rollout's engines wait in the middle of
their answers until `let_go`. `noted_generate` says which rollout has begun, and whose tokens the Buffer has.
"""

import itertools
import json
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from tests.e2e.launch import Launched

_STEPS = 20  # far fewer than an answer has tokens
_LONGEST_S = 120.0  # a test that has failed lets nobody go


def flags(folder: Path, rollouts: list[int], num_streams: int = 0, num_steps: int = _STEPS) -> list[str]:
    """Flags of a run whose engines are held in these rollouts.

    num_streams: they are held when the Buffer has a token of as many answers, which it streams; 0: after `num_steps`.
    """
    config = {"folder": str(folder), "rollouts": rollouts, "streams": num_streams, "steps": num_steps}
    hook = {"name": "hold", "target_modules": ["model"], "hook_factory": "tests.e2e.holds:hold", "config": config}
    return [
        *("--sglang-forward-hooks", json.dumps([hook])),
        *("--custom-generate-function-path", "tests/e2e/holds.py:noted_generate"),
    ]


def wait_for_held(launched: Launched, folder: Path, rollout_id: int) -> list[int]:
    """Wait until engines stand still; return their schedulers' processes."""
    launched.wait_for(lambda: any(folder.glob(f"held-{rollout_id}-*")), timeout_s=300)
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"held-{rollout_id}-*")]


def let_go(folder: Path, rollout_id: int) -> None:
    """Let the engines of this rollout go on."""
    (folder / f"let-go-{rollout_id}").touch()


def hold(config: dict[str, Any]) -> Callable[..., None]:
    """Make the function that an engine calls after each forward pass."""
    folder, left = Path(config["folder"]), dict.fromkeys(config["rollouts"], config["steps"])

    def after_forward(*_: object) -> None:
        begun = [number for number in left if (folder / f"began-{number}").exists()]
        for number in begun:
            left[number] -= 1
            if len(list(folder.glob(f"token-{number}-*"))) < config["streams"]:
                time.sleep(0.02)  # the first answer outlasts the way of the last request
            elif config["streams"] or left[number] <= 0:
                del left[number]
                _stand_still(folder, number)

    return after_forward


def _stand_still(folder: Path, rollout_id: int) -> None:
    go_on, deadline = folder / f"let-go-{rollout_id}", time.monotonic() + _LONGEST_S
    if not go_on.exists():
        (folder / f"held-{rollout_id}-{os.getpid()}").touch()
    while not go_on.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


async def noted_generate(args: Any, sample: Any, sampling_params: Any) -> Any:
    """The default, with files that say which rollout has begun and of which requests a token has come."""
    from fusionrl.plugin_api import generate

    folder = Path(args.run_dir)
    (folder / f"began-{args.rollout_id}").touch()
    client = args.generate_client
    if getattr(client, "noted", None) != args.rollout_id:
        client.noted = args.rollout_id
        client.stream = _noted_stream(client, folder / f"token-{args.rollout_id}")
    return await generate(args, sample, sampling_params)


def _noted_stream(client: Any, path: Path) -> Callable[..., AsyncGenerator[Any, None]]:
    """`GenerateClient.stream`, which `generate` reads under --stream-responses, with a file at its first piece."""
    numbers = itertools.count()

    async def noted(*given: Any) -> AsyncGenerator[Any, None]:
        first = Path(f"{path}-{next(numbers)}")
        async with aclosing(type(client).stream(client, *given)) as pieces:
            async for piece in pieces:
                first.touch()
                yield piece

    return noted
