"""HTTP calls: blocking ones to the control endpoints of engines and router, and `post` for users' functions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import orjson
import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.base.sockets import noticing_socket, silence_options

LONGEST_ANSWER = 256 << 20  # bytes: control endpoints answer kilobytes, checksums of a large model some megabytes
# With ROUTER_KEY, in the environment of the processes that run users' functions, which may ask the engines.
ROUTER_URLS = "FUSIONRL_ROUTER_URLS"
_LONGEST_PAUSE_S = 8.0
_LONGEST_ERROR = 1 << 16  # bytes of the text of an error status

# Explanation of a 401.
NO_KEY = (
    "it wants a key; the run's own router and engines want the header `Authorization: Bearer KEY`, where KEY is"
    f" args.api_key in your functions and {ROUTER_KEY} in their environment. `post` of fusionrl.plugin_api sends it by"
    " itself to args.router_url and args.engine_urls. With --router-api-key none the router requires no key, on one"
    " machine alone"
)


class EndpointError(RuntimeError):
    """An endpoint answered with an error status; `status` holds it."""

    def __init__(self, url: str, status: int, text: str) -> None:
        super().__init__(f"{url} answered {status}: {text[:2000]}")
        self.status = status


def auth_headers(api_key: str | None) -> dict[str, str]:
    """The header that SGLang's server and router expect when they were started with an API key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


class _NoticingAdapter(HTTPAdapter):
    """Opens connections that break when their other end is gone without a word."""

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **kwargs: object) -> None:
        options = [*HTTPConnection.default_socket_options, *silence_options()]
        super().init_poolmanager(connections, maxsize, block, socket_options=options, **kwargs)


def call(
    method: str,
    url: str,
    payload: Mapping[str, object] | None = None,
    *,
    api_key: str | None = None,
    timeout_s: float = 60.0,
) -> object:
    """Send one request; return the decoded JSON, the text where it is none, or None for an empty answer.

    Raises `EndpointError` (a RuntimeError with endpoint, status and text) for a status of 400 or more, and
    RuntimeError without an answer within `timeout_s` seconds, from a machine that is gone within half a minute, or for
    an answer of over `LONGEST_ANSWER` bytes.
    """
    with requests.Session() as session:
        session.mount(url, _NoticingAdapter())
        session.trust_env = False  # a proxy from the environment has no route to an engine
        try:
            response = session.request(
                method,
                url,
                data=None if payload is None else orjson.dumps(payload),
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **auth_headers(api_key)},
                timeout=timeout_s,
                stream=True,
            )
            content = bytearray()
            for part in response.iter_content(1 << 20):
                content += part
                _check_length(response.url, content)
        except requests.RequestException as error:
            raise RuntimeError(f"{url} did not answer: {error}") from error
    text = content.decode(errors="replace")
    if response.status_code >= 400:
        raise EndpointError(url, response.status_code, text)
    if not content:
        return None
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return text


def _check_length(url: str, body: bytearray) -> None:
    """Bound what a body becomes when it is unpacked, too."""
    if len(body) > LONGEST_ANSWER:
        raise RuntimeError(f"{url} answered with over {LONGEST_ANSWER} bytes")


async def post(
    url: str, payload: Mapping[str, object], max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST `payload` as JSON and return the JSON that is answered; the run's own engines get their key by themselves.

    Broken connections and 5xx answers are tried again, with growing pauses of up to 8 s. Raises RuntimeError with the
    server's text for a 4xx answer and the last failed try; also for an answer that is not JSON, or too long.
    """
    import aiohttp  # a tenth of a second, which commands that import this module need not take

    key = os.environ.get(ROUTER_KEY)
    if key and any(f"{url}/".startswith(f"{known}/") for known in os.environ.get(ROUTER_URLS, "").split()):
        headers = {**auth_headers(key), **(headers or {})}
    connector = aiohttp.TCPConnector(socket_factory=noticing_socket)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for attempt in range(max_retries):
            try:
                async with session.post(url, json=payload, headers=headers) as response:
                    if response.status < 400:
                        body = bytearray()
                        async for part in response.content.iter_any():
                            body += part
                            _check_length(url, body)
                        return orjson.loads(body) if body else None
                    text = (await response.content.read(_LONGEST_ERROR)).decode(errors="replace")
                    failure = f"{url} answered {response.status}: {text[:500]}"
                    if response.status == 401:
                        failure += f" ({NO_KEY})"
                    if response.status < 500:
                        raise RuntimeError(failure)
            except orjson.JSONDecodeError as error:
                start = bytes(body[:80])
                raise RuntimeError(f"{url} answered something that is not JSON ({error}): {start!r}") from error
            except aiohttp.ClientError as error:
                failure = f"{url} did not answer: {error!r}"
            if attempt + 1 < max_retries:
                await asyncio.sleep(min(0.25 * 2**attempt, _LONGEST_PAUSE_S))
    raise RuntimeError(f"{failure} ({max_retries} tries)")
