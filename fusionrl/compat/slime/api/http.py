"""Names of `slime.utils.http_utils`, `slime.agent.aiohttp_threaded` and `slime.backends.sglang_utils.server_control`.

`post` is `fusionrl.rollout.engine_post.post`.
"""

import asyncio
import multiprocessing
import os
import random
import socket
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.compat.slime.api.misc import get_current_node_ip
from fusionrl.engines.http import ROUTER_URLS, auth_headers
from fusionrl.rollout.engine_post import post

SLIME_HOST_IP_ENV = "SLIME_HOST_IP"
STOP_TIMEOUT_S = 10.0
_LAST_PORT = 60000


async def get(url: str) -> Any:
    """GET the JSON at `url`; the run's own router and engines get their key by themselves.

    Raises:
        aiohttp.ClientError: no answer, or an error status.
    """
    key = os.environ.get(ROUTER_KEY)
    is_own = any(f"{url}/".startswith(f"{known}/") for known in os.environ.get(ROUTER_URLS, "").split())
    headers = auth_headers(key) if key and is_own else {}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        response.raise_for_status()
        return await response.json(content_type=None)


def init_http_client(args: Namespace) -> None:
    """Do nothing: `post` and `get` need no preparation."""


def is_port_available(port: int) -> bool:
    """Return whether a server may listen on `port` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(1)
        except (OSError, OverflowError):
            return False
        return True


def find_available_port(base_port: int) -> int:
    """Return a free port, looked for from a random place behind `base_port` on."""
    start = base_port + random.randint(100, 1000)
    ports = (*range(start, _LAST_PORT), *range(1024, start))
    return next(port for port in ports if is_port_available(port))


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first port from `start_port` on behind which `consecutive` ports are free."""
    port = start_port
    while not all(is_port_available(port + i) for i in range(consecutive)):
        port += 1
    return port


def get_host_info() -> tuple[str, str]:
    """Return this machine's name and its address; the variable SLIME_HOST_IP sets the address."""
    return socket.gethostname(), os.environ.get(SLIME_HOST_IP_ENV) or get_current_node_ip()


def terminate_process(process: multiprocessing.Process, timeout: float = 1.0) -> None:
    """End a process: ask it, and kill it if it lives on for `timeout` seconds."""
    if process.is_alive():
        process.terminate()
        process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()


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


# ------------------------------------------------------------------------------------------------ aiohttp_threaded
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
