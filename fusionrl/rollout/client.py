"""The HTTP client of one rollout."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from typing import Self

from fusionrl.rollout.event_loop import LoopSemaphore
from fusionrl.rollout.generate_state import new_client, request_limit, rollout_open


class RolloutClient:
    """Opens the client and the concurrency limit of one rollout, and puts both on its `args`, where hooks find them."""

    def __init__(self, args: Namespace) -> None:
        self._counts_retries = args.use_fault_tolerance
        self._open = rollout_open(args)
        args.semaphore = LoopSemaphore(request_limit(args))
        args.generate_client = self._client = new_client(args)
        self._args = args

    def retries(self, prefix: str) -> dict[str, float]:
        """The answers that were refused, where there were any; with --use-fault-tolerance also what was sent again, and
        what was kept of engines that died."""
        client = self._client
        refused: dict[str, float] = {}
        if client.num_answers_refused:
            refused[f"{prefix}/answers_refused"] = client.num_answers_refused
        if not self._counts_retries:
            return refused
        options: dict[str, float] = {
            f"{prefix}/requests_retried": client.num_retries,
            f"{prefix}/tokens_kept": client.num_tokens_kept,
        }
        return options | refused

    def set_engines(self, urls: Sequence[str]) -> None:
        """Send requests to these engines from now on."""
        self._client.set_engines(urls)

    async def __aenter__(self) -> Self:
        self._args.client_loop = asyncio.get_running_loop()
        self._open.__enter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open.__exit__(None, None, None)
        await self._client.close()
