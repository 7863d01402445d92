"""Requests to engines that are cut off, under slime's names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fusionrl.compat.slime.api.http import get
from fusionrl.rollout.engine_post import post


async def abort_server_until_idle(url: str, retry_interval: float = 1.0) -> None:
    """Abort an engine's requests, again and again until none is left: one that was on its way comes after the first.

    Raises:
        RuntimeError, aiohttp.ClientError: the engine does not answer.
    """
    while True:
        await post(f"{url}/abort_request", {"abort_all": True}, max_retries=1)
        loads = (await get(f"{url}/v1/loads?include=core"))["loads"]
        if not any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
            return
        await asyncio.sleep(retry_interval)


async def abort_servers_until_idle(urls: Sequence[str]) -> None:
    """The same for several engines at once."""
    await asyncio.gather(*map(abort_server_until_idle, urls))
