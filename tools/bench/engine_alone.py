"""An engine alone: requests straight to its HTTP server, by a sender that does as little as one can.

`tools/bench/step.py` alternates it with the rollouts of a run, which go through Buffer, client and router to the
same engine: same prompts, number of tokens and sampling, and an empty cache of prompts. The sender has the requests'
bytes ready before the clock starts, and looks for no more in the answers than their number of tokens.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from fusionrl.engines.http import auth_headers, call


def seconds(url: str, api_key: str | None, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Time until all answers to one request a prompt, all sent at once, have come.

    Raises:
        SystemExit: an answer has another number of tokens.
    """
    call("POST", url + "/flush_cache", api_key=api_key)
    place = urlsplit(url)
    assert place.hostname is not None and place.port is not None, url
    requests = [_request(place.netloc, api_key, prompt, new_tokens) for prompt in prompts]
    took, answers = asyncio.run(_send(place.hostname, place.port, requests))
    for answer in answers:
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        if len(body.get("output_ids", ())) != new_tokens:
            raise SystemExit(f"{url} answered {answer[:300]!r}")
    return took


def _request(netloc: str, api_key: str | None, prompt: Sequence[int], new_tokens: int) -> bytes:
    sampling = {"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    payload = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
    body = json.dumps(payload).encode()
    headers = {
        "Host": netloc,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **auth_headers(api_key),
    }
    lines = ["POST /generate HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body


async def _send(host: str, port: int, requests: Sequence[bytes]) -> tuple[float, list[bytes]]:
    async def one(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer

    start = time.perf_counter()
    answers = await asyncio.gather(*(one(request) for request in requests))
    return time.perf_counter() - start, answers
