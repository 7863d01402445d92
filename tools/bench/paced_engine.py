"""Engines that speak SGLang's HTTP protocol and emit tokens at modelled rates, without computing any.

    python -m tools.bench.paced_engine --engines 64 [--time-scale 0.05] [--token-scale 0.05] …

All engines listen on ports of their own, in one process. It prints one line of JSON with their addresses, and ends when
standard input ends. A modelled second takes `--time-scale` seconds; an answer of n modelled tokens has n times
`--token-scale` tokens. `GET /report` of any of them tells what all have done.
"""

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import orjson
from aiohttp import web

from tools.bench.engine_model import Company, Machine, PacedBatch, PauseMode, Request
from tools.bench.lengths import Lengths

_STREAM_S = 0.02  # between two events of a stream
_ID = b"7,"  # every token is this one
_ENTRY = b"[-0.50,7,null],"


@dataclass(frozen=True)
class Scale:
    """How modelled seconds and tokens become real ones."""

    time: float = 1.0
    tokens: float = 1.0

    def real_tokens(self, modelled: float) -> int:
        """Return the number of tokens after scaling; at least one."""
        return max(1, round(modelled * self.tokens))


class PacedEngine:
    """One engine. Belongs to one event loop."""

    def __init__(
        self, machine: Machine, scale: Scale, lengths: Lengths, company: Company, clock: Callable[[], float]
    ) -> None:
        """`clock`: modelled seconds."""
        self.batch = PacedBatch(machine, company, clock())
        self._scale, self._lengths, self._clock = scale, lengths, clock
        self._futures: dict[Request, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._prompts: set[bytes] = set()  # that the cache has
        self.num_ended = self.num_aborted = self.most = 0
        self.latest = 0.0  # seconds by which an end came too late

    # ------------------------------------------------------------------------------------ time
    def now(self) -> None:
        """Bring the model to this moment, and answer what has ended."""
        self._end(self.batch.advance(self._clock()))

    def _wait(self) -> None:
        """Wake up at the next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.batch.next_end()
        if due is not None:
            seconds = max(0.0, due - self._clock()) * self._scale.time
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake, due)

    def _wake(self, due: float) -> None:
        self.latest = max(self.latest, (self._clock() - due) * self._scale.time)
        self.now()
        self._wait()

    def _end(self, ended: list[Request]) -> None:
        for request in ended:
            future = self._futures.pop(request, None)
            if future is not None and not future.done():
                future.set_result(None)
        self.num_ended += len(ended)

    # ------------------------------------------------------------------------------------ requests
    def begin(self, ids: list[int], params: dict[str, Any]) -> tuple[Request, asyncio.Future[None]]:
        """Take one request; the future ends with it."""
        most = int(params.get("max_new_tokens", 128))
        length = min(self._lengths.next_of(ids), max(1, round(most / self._scale.tokens)))
        self.now()
        prompt = orjson.dumps(ids)
        request = Request(self._lengths.prompt, length, cached=prompt in self._prompts)
        self._prompts.add(prompt)
        future = self._futures[request] = asyncio.get_running_loop().create_future()
        self.batch.join(request)
        self.most = max(self.most, len(self._futures))
        self._wait()
        return request, future

    async def answer(self, ids: list[int], params: dict[str, Any]) -> bytes:
        """Return SGLang's JSON of one answer, when it is complete or aborted."""
        request, future = self.begin(ids, params)
        try:
            await future
        finally:
            self.give_up(request)
        return self.body(request, int(params.get("max_new_tokens", 128)))

    def give_up(self, request: Request) -> None:
        """Forget a request that its client no longer waits for."""
        if self._futures.pop(request, None) is not None:
            self.now()
            self.batch.leave(request)
            self._wait()

    def body(self, request: Request, most: int, is_last: bool = True) -> bytes:
        """Return the JSON of all that a request has by now."""
        has = self.batch.tokens_of(request)
        count = min(most, self._scale.real_tokens(has) if has or not request.aborted else 0)
        reason = "abort" if request.aborted else "length" if count >= most else "stop"
        spans, start = [], 0
        for version, end in self.batch.spans_of(request):
            stop = min(count, round(end * self._scale.tokens))
            if stop > start:
                spans.append({"version": version, "start": start, "end": stop})
                start = stop
        if count > start:  # the last span, where rounding has left a token over
            spans.append({"version": self.batch.version, "start": start, "end": count})
        meta = {
            "id": f"{id(request):x}",
            "finish_reason": {"type": reason} if is_last else None,
            "prompt_tokens": request.num_prompt,
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": self.batch.version,
            "weight_versions": spans,
        }
        head = b'{"text":"7","output_ids":[' + (_ID * count)[:-1] + b'],"meta_info":'
        return head + orjson.dumps(meta)[:-1] + b',"output_token_logprobs":[' + (_ENTRY * count)[:-1] + b"]}}"

    # ------------------------------------------------------------------------------------ control
    def pause(self, mode: PauseMode) -> None:
        """Stop generating, as SGLang's /pause_generation."""
        self.now()
        aborted = self.batch.pause(mode)
        self.num_aborted += len(aborted)
        self._end(aborted)
        if mode != "in_place":
            self._prompts.clear()
        self._wait()

    def resume(self) -> None:
        """Go on."""
        self.now()
        self.batch.resume()
        self._wait()

    def abort_all(self) -> None:
        """Answer everything as it is."""
        was_paused = self.batch.is_paused
        self.pause("abort")
        if not was_paused:
            self.resume()

    def set_version(self, version: str) -> None:
        """Take new weights."""
        self.now()
        self.batch.set_version(version)
        self._prompts.clear()
        self._wait()

    def report(self) -> dict[str, float]:
        """Return what it has done so far, in modelled units."""
        self.now()
        batch = self.batch
        return {
            "seconds": batch.now,
            "busy_s": batch.busy_s,
            "paused_s": batch.paused_s,
            "running_s": batch.running_s,
            "tokens": batch.num_sampled,
            "tokens_prefilled_again": batch.num_prefilled_again,
            "ended": self.num_ended,
            "aborted": self.num_aborted,
            "in_flight": len(self._futures),
            "most_in_flight": self.most,
            "latest_s": self.latest,
        }


class Server:
    """The HTTP side of one engine."""

    def __init__(self, engine: PacedEngine, all_engines: list[PacedEngine]) -> None:
        self.engine, self._all = engine, all_engines

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate: whole or streamed; several prompts in one request as well."""
        request_body = orjson.loads(await request.read())
        ids, params = request_body["input_ids"], request_body.get("sampling_params") or {}
        if ids and isinstance(ids[0], list):
            answers = await asyncio.gather(*(self.engine.answer(prompt, params) for prompt in ids))
            return web.Response(body=b"[" + b",".join(answers) + b"]", content_type="application/json")
        if request_body.get("stream"):
            return await self._stream(request, ids, params)
        return web.Response(body=await self.engine.answer(ids, params), content_type="application/json")

    async def _stream(self, request: web.Request, ids: list[int], params: dict[str, Any]) -> web.StreamResponse:
        """Send all tokens so far in each event, as SGLang does by default."""
        most = int(params.get("max_new_tokens", 128))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        paced, future = self.engine.begin(ids, params)
        try:
            while not (await asyncio.wait([future], timeout=_STREAM_S))[0]:
                self.engine.now()
                if self.engine.batch.tokens_of(paced) * self.engine._scale.tokens >= 1 and not future.done():
                    await response.write(b"data: " + self.engine.body(paced, most, is_last=False) + b"\n\n")
        finally:
            self.engine.give_up(paced)
        await response.write(b"data: " + self.engine.body(paced, most) + b"\n\ndata: [DONE]\n\n")
        return response

    async def pause(self, request: web.Request) -> web.Response:
        """POST /pause_generation."""
        mode = (await _read(request)).get("mode", "abort")
        if mode not in get_args(PauseMode):
            return web.Response(status=422, text=f"mode {mode!r}")
        self.engine.pause(mode)
        return _done()

    async def resume(self, request: web.Request) -> web.Response:
        """POST /continue_generation."""
        self.engine.resume()
        return _done()

    async def abort(self, request: web.Request) -> web.Response:
        """POST /abort_request; of all requests alone."""
        if (await _read(request)).get("abort_all"):
            self.engine.abort_all()
        return _done()

    async def update(self, request: web.Request) -> web.Response:
        """POST /update_weights_from_…: takes the version."""
        version = (await _read(request)).get("weight_version")
        if version is not None:
            self.engine.set_version(str(version))
        return web.json_response({"success": True, "message": ""})

    async def plain(self, request: web.Request) -> web.Response:
        """Return a success."""
        return _done()

    async def info(self, request: web.Request) -> web.Response:
        """GET /model_info and /server_info, which the router asks."""
        return web.json_response(
            {"model_path": "paced", "tokenizer_path": "paced", "weight_version": self.engine.batch.version}
        )

    async def report(self, request: web.Request) -> web.Response:
        """GET /report: of every engine of the process."""
        cpu = time.process_time()
        return web.json_response({"cpu_s": cpu, "engines": [engine.report() for engine in self._all]})

    async def start(self) -> str:
        """Listen; returns the address."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.resume)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/flush_cache", self.plain)
        for source in ("disk", "tensor", "distributed"):
            app.router.add_post(f"/update_weights_from_{source}", self.update)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self.plain)
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self.info)
        app.router.add_get("/report", self.report)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _read(request: web.Request) -> dict[str, Any]:
    body = await request.read()
    return orjson.loads(body) if body else {}


def _done() -> web.Response:
    return web.json_response({"status": "ok"})


async def start_engines(
    count: int, machine: Machine, scale: Scale, lengths: Lengths, weight: float = 1.0
) -> dict[str, PacedEngine]:
    """Start so many engines in this event loop; returns address → engine. `weight` as of `Company`."""
    start, company = time.monotonic(), Company(weight, count)

    def clock() -> float:
        return (time.monotonic() - start) / scale.time

    engines = [PacedEngine(machine, scale, lengths, company, clock) for _ in range(count)]
    return {await Server(engine, engines).start(): engine for engine in engines}


async def _serve(options: argparse.Namespace) -> None:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the router tries gRPC first
    machine = Machine(gpus=options.gpus, overhead_s=options.overhead_s, max_running=options.max_running)
    scale = Scale(options.time_scale, options.token_scale)
    lengths = Lengths(options.median, options.sigma, options.longest, options.prompt, options.seed)
    urls = await start_engines(options.engines, machine, scale, lengths, options.weight)
    print(json.dumps(list(urls)), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=Machine.gpus, help="of an engine (tensor parallel)")
    parser.add_argument("--overhead-s", type=float, default=Machine.overhead_s)
    parser.add_argument("--max-running", type=int, default=Machine.max_running)
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds that a modelled second takes")
    parser.add_argument("--token-scale", type=float, default=1.0, help="tokens that a modelled token becomes")
    parser.add_argument("--weight", type=float, default=1.0, help="modelled requests for each request")
    parser.add_argument("--median", type=float, default=Lengths.median, help="modelled tokens of an answer")
    parser.add_argument("--sigma", type=float, default=Lengths.sigma)
    parser.add_argument("--longest", type=int, default=Lengths.longest)
    parser.add_argument("--prompt", type=int, default=Lengths.prompt, help="modelled tokens of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    asyncio.run(_serve(parser().parse_args()))
