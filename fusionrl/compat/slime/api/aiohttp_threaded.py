"""Names of `slime.agent.aiohttp_threaded`: a web application in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

STOP_TIMEOUT_S = 10.0


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs requests that failed or took long; not those that are in order."""

    SLOW_THRESHOLD_SEC = 120.0

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log one request."""
        is_in_order = response.status == 200 and time <= self.SLOW_THRESHOLD_SEC
        if request.method != "HEAD" and not is_in_order:
            self.logger.info("%s %s: %s after %.1f s", request.method, request.path, response.status, time)


@dataclass
class AppHandle:
    """A web application that listens, and how to end it."""

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner

    def stop(self) -> None:
        """Close the application and end its thread."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(STOP_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(STOP_TIMEOUT_S)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "0.0.0.0",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Serve `app` from a thread of its own; returns when it listens. Port 0: a free one, which the handle names.

    Raises:
        OSError: the port is taken.
        TimeoutError: it does not listen in time.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=thread_name, daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(app, **(runner_kwargs or {}))
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return runner, int(runner.addresses[0][1])

    runner, bound = asyncio.run_coroutine_threadsafe(start(), loop).result(start_timeout_sec)
    return AppHandle(host, bound, thread, loop, runner)
