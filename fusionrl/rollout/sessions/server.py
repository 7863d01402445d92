"""The HTTP server in front of the sessions of a process: loopback alone, started by the first session."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from aiohttp import web

from fusionrl.rollout.sessions import anthropic_api, openai_api, responses_api
from fusionrl.rollout.sessions.messages import Refused, TurnReply, TurnRequest

if TYPE_CHECKING:
    from fusionrl.rollout.sessions.session import Session

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
LONGEST_BODY = 64 << 20  # bytes of a request; a context of a million tokens has some
FIRST_PING_S, PING_S = 5.0, 10.0  # until a streamed answer begins with a sign of life, and between two of them
BLOCKED_S = 60.0  # without a sign of the agent's event loop, a request is refused
_MOST_TOLD = 5  # requests without a key of which the log speaks

# A protocol is a module with `read` for requests; `answer`, `events`, `error` and `error_event`; and KEEP_ALIVE.
Api = ModuleType


class SessionServer:
    """Serves `/sessions/ID/v1/…` from a thread of its own, so that an agent may run on any event loop or thread.

    Whatever carries no key of an open session is answered with 401, whatever its path.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._num_strangers = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sessions", daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def add(self, session: Session) -> None:
        """Answer requests of a session, and tell it its address; one with the key in place of the id needs no key."""
        session.base_url = f"{self.url}/sessions/{session.id}/v1"
        self._sessions[session.id] = self._sessions[session.api_key] = session

    def remove(self, session: Session) -> None:
        for name in (session.id, session.api_key):
            self._sessions.pop(name, None)

    async def _listen(self) -> str:
        app = web.Application(client_max_size=LONGEST_BODY, middlewares=[self._guard])
        # With and without a /v1 of their own: OpenAI's client appends /chat/completions, Anthropic's /v1/messages.
        for base in ("/sessions/{id}", "/sessions/{id}/v1", "/sessions/{id}/v1/v1"):
            app.router.add_post(f"{base}/chat/completions", functools.partial(self._complete, openai_api))
            app.router.add_post(f"{base}/responses", functools.partial(self._complete, responses_api))
            app.router.add_post(f"{base}/messages", functools.partial(self._complete, anthropic_api))
            app.router.add_post(f"{base}/messages/count_tokens", self._count)
            app.router.add_get(f"{base}/models", self._models)
            app.router.add_get(f"{base}/models/{{model}}", self._models)
        # A client that hangs up ends its turn: the engines need not finish it.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    # -------------------------------------------------------------------------------- who asks
    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let requests of an open session through, and give every error its protocol's form."""
        is_anthropic = "/messages" in request.path or "anthropic-version" in request.headers
        api = anthropic_api if is_anthropic else openai_api
        try:
            self._session_of(request)
            return await handler(request)
        except Refused as refused:
            return _error(api, refused)
        except web.HTTPRequestEntityTooLarge:
            return _error(api, Refused(f"the body has over {LONGEST_BODY} bytes", 413))
        except web.HTTPException as error:
            paths = "/v1/chat/completions, /v1/responses, /v1/messages and /v1/models"
            problem = f"{request.method} {request.path}: {error.reason}; a session has {paths}"
            return _error(api, Refused(problem, error.status))

    def _session_of(self, request: web.Request) -> Session:
        parts = request.path.split("/")
        session = self._sessions.get(parts[2]) if len(parts) > 2 and parts[1] == "sessions" else None
        # Anthropic's header, and the one of OpenAI and of Anthropic's tokens.
        keys = request.headers.get("x-api-key", ""), request.headers.get("Authorization", "").removeprefix("Bearer ")
        # A header may be invalid Unicode.
        candidates = [candidate.encode(errors="replace") for candidate in (*parts[2:3], *keys)]
        if session is not None and any(hmac.compare_digest(c, session.api_key.encode()) for c in candidates):
            return session
        problem = (
            "no open session of this run has this address and key: an agent's client needs the base_url and the api_key"
            " that the agent was given, and a session ends with its agent"
        )
        self._num_strangers += 1
        if self._num_strangers <= _MOST_TOLD:
            logger.warning("%s %r answered 401: %s", request.method, request.path, problem)
        raise Refused(problem, 401, "invalid_api_key")

    # -------------------------------------------------------------------------------- what is asked
    async def _complete(self, api: Api, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        turn_request = api.read(await _body(request))
        turn = _Turn(session, turn_request)
        try:
            # An error of the request keeps its status, as what it asks is checked before the model begins.
            reply = await turn.wait(FIRST_PING_S)
            if turn_request.is_stream:
                return await _streamed(api, request, turn_request, reply, turn)
            while reply is None:
                reply = await turn.wait(PING_S)
            return web.json_response(api.answer(turn_request, reply))
        finally:
            turn.cancel()  # where the client has gone

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        turn_request = anthropic_api.read(await _body(request))
        return web.json_response({"input_tokens": await asyncio.to_thread(session.count_tokens, turn_request)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """The one model, in words of both protocols."""
        name = request.match_info.get("model") or self._session_of(request).model
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "fusionrl"}
        entry |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        if "model" in request.match_info:
            return web.json_response(entry)
        page = {"object": "list", "data": [entry], "has_more": False, "first_id": name, "last_id": name}
        return web.json_response(page)


_starting = threading.Lock()
_started = functools.cache(SessionServer)


def process_server() -> SessionServer:
    """Return the server of this process; the first call starts it."""
    with _starting:
        return _started()


class _Turn:
    """A turn that is under way on the event loop of its session."""

    def __init__(self, session: Session, turn_request: TurnRequest) -> None:
        self._session, self._turn_request, self._has_begun = session, turn_request, False
        self._since = asyncio.get_running_loop().time()
        self._future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(), session.loop))

    async def _run(self) -> TurnReply:
        self._has_begun = True
        return await self._session.answer(self._turn_request)

    async def wait(self, seconds: float) -> TurnReply | None:
        """Wait so long for the answer; None: it is not there yet.

        Raises Refused if the request is refused, or the loop is blocked: by the agent, as a rule, whose client waits
        there.
        """
        await asyncio.wait([self._future], timeout=seconds)
        if self._future.done():
            return await self._future
        if not self._has_begun and asyncio.get_running_loop().time() > self._since + BLOCKED_S:
            raise Refused(
                "the event loop on which the agent runs does nothing: an `async def` agent must await its client"
                " (AsyncOpenAI, AsyncAnthropic); with a client that blocks, write a plain `def`, which gets a thread",
                400,
                "event_loop_blocked",
            )
        return None

    def cancel(self) -> None:
        self._future.cancel()


async def _streamed(
    api: Api, request: web.Request, turn_request: TurnRequest, reply: TurnReply | None, turn: _Turn
) -> web.StreamResponse:
    """Send an answer as a stream, with signs of life until it is there (`reply` is None)."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        while reply is None:
            await response.write(api.KEEP_ALIVE)
            reply = await turn.wait(PING_S)
        for event in api.events(turn_request, reply):
            await response.write(event)
    except Refused as refused:
        await response.write(api.error_event(refused))
    await response.write_eof()
    return response


async def _body(request: web.Request) -> Mapping[str, object]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    return body


def _error(api: Api, refused: Refused) -> web.Response:
    return web.json_response(api.error(refused), status=refused.status)
