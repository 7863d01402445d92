"""`post`: one JSON request of a user's function, tried again where that may help."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.engines.http import LONGEST_ANSWER, ROUTER_URLS, auth_headers

if TYPE_CHECKING:
    import aiohttp

_LONGEST_PAUSE_S = 8.0
_LONGEST_ERROR = 1 << 16  # bytes of the text of an error status

# Explanation of a 401.
NO_KEY = (
    "it wants a key; the run's own router and engines want the header `Authorization: Bearer KEY`, where KEY is"
    f" args.api_key in your functions and {ROUTER_KEY} in their environment. `post` of fusionrl.plugin_api sends it by"
    " itself to args.router_url and args.engine_urls. With --router-api-key none the router requires no key, on one"
    " machine alone"
)


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
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for attempt in range(max_retries):
            try:
                async with session.post(url, json=payload, headers=headers) as response:
                    if response.status < 400:
                        return _decoded(url, await _bounded(url, response))
                    text = (await response.content.read(_LONGEST_ERROR)).decode(errors="replace")
                    failure = f"{url} answered {response.status}: {text[:500]}"
                    if response.status == 401:
                        failure += f" ({NO_KEY})"
                    if response.status < 500:
                        raise RuntimeError(failure)
            except aiohttp.ClientError as error:
                failure = f"{url} did not answer: {error!r}"
            if attempt + 1 < max_retries:
                await asyncio.sleep(min(0.25 * 2**attempt, _LONGEST_PAUSE_S))
    raise RuntimeError(f"{failure} ({max_retries} tries)")


async def _bounded(url: str, response: aiohttp.ClientResponse) -> bytes:
    """The body; what it becomes when it is unpacked is bounded, too."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > LONGEST_ANSWER:
            raise RuntimeError(f"{url} answered with over {LONGEST_ANSWER} bytes")
        parts.append(part)
    return b"".join(parts)


def _decoded(url: str, body: bytes) -> object:
    try:
        return orjson.loads(body) if body else None
    except orjson.JSONDecodeError as error:
        raise RuntimeError(f"{url} answered something that is not JSON ({error}): {body[:80]!r}") from error
