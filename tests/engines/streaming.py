"""An HTTP engine that streams one known answer, and dies, hangs or refuses when a test says so."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Engine:
    """Answers with `tokens`, wherever a request begins in them, from a prompt of `num_prompt` tokens on.

    `faults` are taken one a request: ("die", n) breaks the connection after n tokens, ("hang", n) sends no more,
    ("end", n) ends the stream without a last token, ("error", code) and ("abort", code) are SGLang's two ways to refuse
    within a stream, ("status", code) is the plain one. `version` is that of the weights.
    """

    tokens: list[int]
    num_prompt: int
    faults: list[tuple[str, int]] = field(default_factory=list)
    is_incremental: bool = True
    version: str = "7"
    healthy: bool = True
    routed_experts: bytes | None = None  # what a request that asks for it gets, in base64
    api_key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client went before the end
    url: str = ""

    def log_prob(self, position: int) -> float:
        return -0.25 * (position + 1)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        self.keys.append(request.headers.get("X-SMG-Routing-Key"))
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.Response(status=401)
        fault, at = self.faults.pop(0) if self.faults else ("none", 0)
        if fault == "status":
            return web.Response(status=at, text="not now")
        start = len(asked["input_ids"]) - self.num_prompt
        assert asked["input_ids"][self.num_prompt :] == self.tokens[:start]
        end = min(len(self.tokens), start + asked["sampling_params"]["max_new_tokens"])
        if not asked.get("stream"):
            await self.stumble(request, fault)
            return web.json_response(self.event(start, start, end, is_last=True))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number, position in enumerate(range(start, end)):
                if fault in ("error", "abort"):
                    await self.send(response, self.refusal(fault, at))
                    break
                if fault == "end" and number == at:
                    return response
                if number == at:
                    await self.stumble(request, fault)
                await self.send(response, self.event(start, position, position + 1, is_last=position + 1 == end))
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        return response

    async def stumble(self, request: web.Request, fault: str) -> None:
        if fault == "die":
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(10)
        if fault == "hang":
            await asyncio.sleep(600)

    def event(self, start: int, first: int, end: int, is_last: bool) -> dict[str, Any]:
        """Tokens `first` to `end` of a request that began at `start`."""
        shown = range(first if self.is_incremental else start, end)
        meta = {
            "id": "r",
            "finish_reason": {"type": "length"} if is_last else None,
            "weight_version": self.version,
            "completion_tokens": end - start,
            "prompt_tokens": self.num_prompt,
            "output_token_logprobs": [[self.log_prob(i), self.tokens[i], None] for i in shown],
        }
        if is_last:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": end - start}]
            if self.routed_experts is not None and self.asked[-1].get("return_routed_experts"):
                meta["routed_experts"] = base64.b64encode(self.routed_experts).decode()
        text = "".join(chr(self.tokens[i]) for i in shown)
        return {"text": text, "output_ids": [self.tokens[i] for i in shown], "meta_info": meta}

    @staticmethod
    def refusal(fault: str, code: int) -> dict[str, Any]:
        if fault == "error":
            return {"error": {"message": "the server's words", "type": "invalid_request_error", "code": code}}
        reason = {"type": "abort", "status_code": code, "message": "the server's words"}
        return {"text": "", "output_ids": [], "meta_info": {"finish_reason": reason, "completion_tokens": 0}}

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0)

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.healthy else 503)

    async def info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"model_path": "m", "tokenizer_path": "m", "weight_version": self.version})

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.info)
        app.router.add_get("/health", self.health)
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self.info)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return runner


def serve(engine: Engine, use: Callable[..., Awaitable[Any]], *others: Engine) -> Any:
    """Run `use(url, …)` while the engines answer."""
    engines = (engine, *others)

    async def run() -> Any:
        runners = [await engine.start() for engine in engines]
        try:
            return await use(*(engine.url for engine in engines))
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(run())


NUMBER = web.AppKey("number", int)
Answers = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve_all(
    answer: Answers, use: Callable[[list[str]], Awaitable[Any]], num_engines: int = 2, path: str = "/generate"
) -> Any:
    """Run `use(urls)` with engines that answer by `answer`, which finds its number in `request.app[NUMBER]`."""

    async def run() -> Any:
        runners, urls = [], []
        for number in range(num_engines):
            app = web.Application(client_max_size=1 << 30)
            app[NUMBER] = number
            app.router.add_post(path, answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            urls.append("http://{}:{}".format(*runner.addresses[0][:2]))
        try:
            return await use(urls)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(run())
