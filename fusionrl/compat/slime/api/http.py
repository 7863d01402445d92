"""Names of `slime.utils.http_utils` except `post`."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
from argparse import Namespace
from typing import Any

import aiohttp

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.compat.slime.api.misc import get_current_node_ip
from fusionrl.engines.http import ROUTER_URLS, auth_headers

SLIME_HOST_IP_ENV = "SLIME_HOST_IP"
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
