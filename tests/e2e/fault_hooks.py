"""Faults that a run meets in its second rollout, once: made by a user's functions within the process concerned.

The file that FUSIONRL_TEST_FILE names has the fault; who makes it takes the file away.
"""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

_lock = threading.Lock()


def _takes(name: str) -> bool:
    """Return whether the test wants this fault; the first caller makes it."""
    path = Path(os.environ.get("FUSIONRL_TEST_FILE", "/dev/null/none"))
    with _lock:
        is_asked = path.exists() and path.read_text() == name
        if is_asked:
            path.unlink()
        return is_asked


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """The share of digits. One call may wait until the test has done something to the machine ("hold")."""
    if args.rollout_id == 1 and _takes("hold"):
        held = Path(os.environ["FUSIONRL_TEST_FILE"]).with_name("held")
        held.touch()
        while held.exists():
            await asyncio.sleep(0.05)
    if args.rollout_id == 1 and _takes("no more memory of a reward"):
        bytearray(2**62)
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


async def generate(args: Any, sample: Any, sampling_params: Any) -> Any:
    """The default answer; one call takes the engine its version, as if another user had started it again."""
    from fusionrl.plugin_api import generate as default
    from fusionrl.plugin_api import post

    if args.rollout_id == 1 and _takes("wrong version"):
        await post(f"{args.engine_urls[0]}/update_weight_version", {"new_version": "default"})
    return await default(args, sample, sampling_params)


def before_step(args: Any, rollout_id: int, index: int, model: Any, *_: Any) -> None:
    """In a trainer, before its optimizer step: flip a bit of the second rank's weights."""
    import torch
    import torch.distributed as dist

    if rollout_id == 1 and dist.get_rank() == 1 and _takes("a flipped bit"):
        next(model[0].parameters()).data.view(torch.int32).reshape(-1)[5] ^= 1
