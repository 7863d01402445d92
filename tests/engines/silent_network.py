"""Two machines joined by a cable, which is cut while a request is under way: no packet arrives, and no error either.

    unshare --net python -m tests.engines.silent_network client|router|call

The far machine's engine holds every request; the near one's answers at once. Prints JSON: seconds from the cut to the
answer, or to the error, and which it was.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from aiohttp import web

from fusionrl.base import sockets
from fusionrl.engines.client import GenerateClient
from fusionrl.engines.http import call
from fusionrl.engines.router import Router
from tests.engines.answer_mutations import GOOD

NEAR, FAR, PORT = "10.88.0.1", "10.88.0.2", 8000
SILENCE_S = 6  # in place of half a minute; not of the router, which has a time limit of its own


def ip(*words: str, of: int | None = None) -> None:
    there = [] if of is None else ["nsenter", "--target", str(of), "--net"]
    subprocess.run([*there, "ip", *words], check=True, capture_output=True)


async def serve(host: str, holds: bool) -> None:
    """An engine, as the router knows them; it says on standard output that a request has come."""

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        print("asked", flush=True)
        if holds:
            await asyncio.sleep(600)
        return web.json_response(GOOD)

    async def facts(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "status": "ready"})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/{name:.*}", facts)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, PORT).start()
    print("serving", flush=True)


async def serve_far() -> None:
    print("here", flush=True)
    while "far" not in os.listdir("/proc/sys/net/ipv4/conf"):
        await asyncio.sleep(0.05)
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{FAR}/24", "dev", "far")
    ip("link", "set", "far", "up")
    await serve("0.0.0.0", holds=True)
    await asyncio.sleep(600)


async def ask(urls: list[str], far: subprocess.Popen[str], **settings: Any) -> dict[str, object]:
    payload = {"input_ids": [1, 2], "return_logprob": True, "sampling_params": {"max_new_tokens": 100}}
    assert far.stdout is not None
    async with GenerateClient(urls[0], None, 60.0, **settings) as client:
        asked = asyncio.create_task(asyncio.to_thread(far.stdout.readline))
        answers = [asyncio.create_task(client.generate(payload)) for _ in range(2)]
        assert (await asked).strip() == "asked"
        ip("link", "set", "far", "down", of=far.pid)
        since = time.monotonic()
        done = await asyncio.gather(*answers, return_exceptions=True)
        said = [repr(one) if isinstance(one, BaseException) else "answered" for one in done]
        return {"seconds": time.monotonic() - since, "said": said, "retries": client.num_retries}


async def ask_as_the_driver(url: str, far: subprocess.Popen[str]) -> dict[str, object]:
    """A call that may take half an hour, as a push does."""
    assert far.stdout is not None
    asked = asyncio.create_task(asyncio.to_thread(far.stdout.readline))
    answer = asyncio.create_task(asyncio.to_thread(call, "POST", f"{url}/generate", {}, timeout_s=1800.0))
    assert (await asked).strip() == "asked"
    ip("link", "set", "far", "down", of=far.pid)
    since = time.monotonic()
    (said,) = await asyncio.gather(answer, return_exceptions=True)
    return {"seconds": time.monotonic() - since, "said": [repr(said)]}


async def main(case: str) -> None:
    sockets._SILENCE_S = SILENCE_S
    ip("link", "set", "lo", "up")
    command = ["unshare", "--net", sys.executable, "-m", "tests.engines.silent_network", "far"]
    far = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # unshare becomes the program
    assert far.stdout is not None and far.stdout.readline().strip() == "here"
    try:
        ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(far.pid))
        ip("address", "add", f"{NEAR}/24", "dev", "near")
        ip("link", "set", "near", "up")
        assert far.stdout.readline().strip() == "serving"
        far_url, near_url = f"http://{FAR}:{PORT}", f"http://{NEAR}:{PORT}"
        await serve(NEAR, holds=False)
        if case == "client":
            found = await ask([far_url], far, num_tries=1)
        elif case == "call":
            found = await ask_as_the_driver(far_url, far)
        else:
            with tempfile.TemporaryDirectory() as logs:
                router = Router("127.0.0.1", logs, router_args={"policy": "round_robin"})
                try:
                    url = await asyncio.to_thread(router.start)
                    for worker in (far_url, near_url):
                        await asyncio.to_thread(router.add_worker, worker)
                    found = await ask([url], far)
                finally:
                    router.shutdown()
        print(json.dumps(found))
    finally:
        far.kill()


if __name__ == "__main__":
    asyncio.run(serve_far() if sys.argv[1] == "far" else main(sys.argv[1]))
