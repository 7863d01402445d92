"""The HTTP client of one rollout."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Self

from fusionrl.engines.client import GenerateClient


class RolloutClient:
    """Opens the client and the concurrency limit of one rollout, and puts both on its `args`, where hooks find them."""

    def __init__(self, args: Namespace) -> None:
        self._counts_retries = args.use_fault_tolerance
        limit = args.sglang_server_concurrency * max(1, len(args.engine_urls))
        args.semaphore = asyncio.Semaphore(limit)
        args.generate_client = self._client = GenerateClient(
            args.router_url,
            args.api_key,
            timeout_s=3600.0,
            max_connections=limit,
            vocab_size=args.vocab_size,  # an id beyond it would kill the server that is asked for it
            stream_responses=args.stream_responses,
            # The router drops the request for experts.
            worker_urls=args.engine_urls if getattr(args, "routed_experts_size", None) else (),
            engine_urls=args.engine_urls,
        )

    def retries(self, prefix: str) -> dict[str, float]:
        """The answers that were refused, where there were any; with --use-fault-tolerance also what was sent again, and
        what was kept of engines that died."""
        client = self._client
        refused: dict[str, float] = {}
        if client.num_answers_refused:
            refused[f"{prefix}/answers_refused"] = client.num_answers_refused
        if not self._counts_retries:
            return refused
        kept: dict[str, float] = {
            f"{prefix}/requests_retried": client.num_retries,
            f"{prefix}/tokens_kept": client.num_tokens_kept,
        }
        return kept | refused

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()
