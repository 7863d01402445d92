"""A model of one engine in time: how fast requests that run together get their tokens, without computing any.

Pure: time is what the caller says it is, in seconds of the modelled machine. The time between two tokens is a constant
plus the larger of two: reading the weights and the KV cache from memory, and the arithmetic of one token for each
request. All running requests get their tokens at one pace, so one count of tokens, `progress`, serves them all.
"""

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

PauseMode = Literal["abort", "retract", "in_place"]
_STRIDE = 64.0  # tokens after which the growth of the KV cache is looked at again


@dataclass(frozen=True)
class Machine:
    """An engine of `gpus` devices that serves one model. The defaults: Qwen2.5-7B in bf16 on H20.

    gpus              tensor-parallel devices of the engine
    parameters        of the model
    bytes_per_weight  2: bf16
    kv_bytes          of one token, over all layers
    bandwidth         bytes a second of one device, of which `bandwidth_share` are reached
    flops             of one device a second, of which `flops_share` are reached
    overhead_s        of each token: launches, collectives, sampling
    max_running       requests that run at once; the others queue
    """

    gpus: int = 4
    parameters: float = 7.6e9
    bytes_per_weight: float = 2.0
    kv_bytes: float = 57_344.0  # 28 layers, keys and values of 4 heads of 128, 2 bytes each
    bandwidth: float = 4e12
    bandwidth_share: float = 0.8
    flops: float = 148e12
    flops_share: float = 0.7
    overhead_s: float = 0.004
    max_running: int = 256

    def token_s(self, num_running: float, context: float) -> float:
        """Return the seconds between two tokens of `num_running` requests that hold `context` tokens together."""
        memory = self.parameters * self.bytes_per_weight + context * self.kv_bytes
        reading = memory / (self.gpus * self.bandwidth * self.bandwidth_share)
        arithmetic = num_running * 2 * self.parameters / (self.gpus * self.flops * self.flops_share)
        return self.overhead_s + max(reading, arithmetic)

    def prefill_s(self, num_tokens: float) -> float:
        """Return the seconds in which the keys and values of `num_tokens` tokens are computed."""
        return num_tokens * 2 * self.parameters / (self.gpus * self.flops * self.flops_share)


@dataclass(eq=False)
class Request:
    """One request. Tokens are those of the model, before any scale.

    num_prompt  tokens that are read before the first is sampled
    num_tokens  tokens that are sampled
    cached      the KV cache has the prompt, so it is not computed again
    begun       `progress` when it began to run (again), None: it waits
    done        tokens of earlier stretches
    spans       (version, tokens up to its end), of the versions that have ended
    """

    num_prompt: int
    num_tokens: float
    cached: bool = False
    begun: float | None = None
    done: float = 0.0
    first_version: str = ""
    spans: list[tuple[str, float]] = field(default_factory=list)
    aborted: bool = False


@dataclass
class Company:
    """Requests that are modelled and not made: for each real one of the cluster `weight` - 1 others, spread evenly over
    its engines. So each engine has the load of all, and a long answer is not long many times over at one engine.

    num_running, context  of all real requests that run
    retracted             how often an engine was paused → tokens whose KV cache all engines gave up at that pause
    """

    weight: float = 1.0
    num_engines: int = 1
    num_running: int = 0
    context: float = 0.0
    retracted: Counter[int] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Return what one engine has of them, for one of the real ones."""
        return (self.weight - 1) / self.num_engines


class PacedBatch:
    """The requests of one engine. Call `advance` before anything else at a moment, with that moment."""

    def __init__(self, machine: Machine, company: Company | None = None, now: float = 0.0) -> None:
        self.machine, self.company = machine, company or Company()
        self.now, self.progress, self.version = now, 0.0, "0"
        self.is_paused = False
        self.running: set[Request] = set()
        self.waiting: deque[Request] = deque()
        self.busy_s = self.paused_s = 0.0
        self.num_sampled = self.num_prefilled_again = 0.0  # tokens
        self.running_s = 0.0  # requests that run, over time
        self._prefill_s = 0.0  # of work that goes before the next token
        self._ends: list[tuple[float, int, Request]] = []  # (progress at its end, its turn, request)
        self._begun = self._num_pauses = 0
        self._context = 0.0  # tokens in the KV cache at `progress`

    @property
    def limit(self) -> int:
        """Return how many requests of here run at once."""
        return max(1, int(self.machine.max_running / self.company.weight))

    def join(self, request: Request) -> None:
        """Take a new request."""
        request.first_version = request.first_version or self.version
        self.waiting.append(request)
        self._fill()

    def leave(self, request: Request) -> None:
        """Forget a request that its client no longer waits for."""
        if request in self.running:
            self._stop(request)
            self._fill()
        elif request in self.waiting:
            self.waiting.remove(request)

    def tokens_of(self, request: Request) -> float:
        """Return the tokens that a request has by now."""
        if request.begun is None:
            return request.done
        return min(request.num_tokens, request.done + self.progress - request.begun)

    def advance(self, now: float) -> list[Request]:
        """Advance the time to `now`; return the requests that ended meanwhile, in order."""
        ended: list[Request] = []
        while True:
            left = now - self.now
            if left <= 0:
                return ended
            if self.is_paused or not self.running:
                self.paused_s += left if self.is_paused else 0.0
                self.now = now
                return ended
            if self._prefill_s > 0:
                self._go(min(left, self._prefill_s), is_prefill=True)
                continue
            pace = self._token_s()
            tokens = min(self._ends[0][0] - self.progress, _STRIDE)
            if tokens * pace > left:
                self._go(left, left / pace)
                return ended
            self._go(tokens * pace, tokens)
            while self._ends and self._ends[0][0] <= self.progress + 1e-6:
                request = self._ends[0][2]
                self._stop(request)
                request.done = request.num_tokens
                ended.append(request)
            self._fill()

    def next_end(self) -> float | None:
        """Return a moment at or before the next request's end; None where none will come."""
        if self.is_paused or not self.running:
            return None
        return self.now + self._prefill_s + (self._ends[0][0] - self.progress) * self._token_s()

    def pause(self, mode: PauseMode) -> list[Request]:
        """Stop; returns the requests that this ends as they are."""
        self.is_paused = True
        self._num_pauses += 1
        if mode == "in_place":
            return []
        stopped = sorted(self.running, key=lambda request: request.begun or 0.0)
        for request in stopped:
            request.done, request.begun = self.tokens_of(request), None
        self._count(-len(self.running), -self._context)
        self.running.clear()
        self._ends.clear()
        self._prefill_s = 0.0
        if mode == "retract":
            self.company.retracted[self._num_pauses] += sum(request.num_prompt + request.done for request in stopped)
            self.waiting.extendleft(reversed(stopped))
            return []
        stopped += self.waiting
        self.waiting.clear()
        for request in stopped:
            request.aborted = True
        return stopped

    def resume(self) -> None:
        """Go on."""
        self.is_paused = False
        again = self.company.share * self.company.retracted[self._num_pauses]
        self._prefill_s += self.machine.prefill_s(again)
        self._fill()

    def set_version(self, version: str) -> None:
        """Switch to new weights; the cache still holds values of the old weights."""
        for request in [*self.running, *self.waiting]:
            request.spans.append((self.version, self.tokens_of(request)))
            request.cached = False
        self.version = version

    def spans_of(self, request: Request) -> list[tuple[str, float]]:
        """Return (version, tokens up to its end) of all that a request has."""
        return [*request.spans, (self.version, self.tokens_of(request))]

    # ------------------------------------------------------------------------------------ within
    def _token_s(self) -> float:
        company = self.company
        num_running = len(self.running) + company.share * company.num_running
        return self.machine.token_s(num_running, self._context + company.share * company.context)

    def _count(self, num_running: int, context: float) -> None:
        """Count requests that begin or end here, and the growth of their contexts."""
        self._context += context
        self.company.num_running += num_running
        self.company.context += context

    def _go(self, seconds: float, tokens: float = 0.0, is_prefill: bool = False) -> None:
        self.now += seconds
        self.busy_s += seconds
        self.running_s += seconds * len(self.running)
        self.progress += tokens
        self._count(0, tokens * len(self.running))
        self.num_sampled += tokens * len(self.running)
        if is_prefill:
            self._prefill_s = max(0.0, self._prefill_s - seconds)
            if self._prefill_s < 1e-9:
                self._prefill_s = 0.0

    def _fill(self) -> None:
        if self.is_paused:
            return
        while self.waiting and len(self.running) < self.limit:
            request = self.waiting.popleft()
            request.begun = self.progress
            self.running.add(request)
            self._begun += 1
            heapq.heappush(self._ends, (self.progress + request.num_tokens - request.done, self._begun, request))
            self._count(1, request.num_prompt + request.done)
            again = request.done + (request.num_prompt if request.done else 0)
            self.num_prefilled_again += again
            read = 0 if request.cached else request.num_prompt * self.company.weight
            self._prefill_s += self.machine.prefill_s(again or read)

    def _stop(self, request: Request) -> None:
        """Take a request out of those that run; what it has is kept in `done`."""
        assert request.begun is not None
        request.done = self.tokens_of(request)
        request.begun = None
        self.running.remove(request)
        self._count(-1, -request.num_prompt - request.done)
        if self._ends[0][2] is request:
            heapq.heappop(self._ends)
        else:
            self._ends = [end for end in self._ends if end[2] is not request]
            heapq.heapify(self._ends)
