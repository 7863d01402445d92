"""State that the functions of a rollout share, from any thread and event loop: client, limits, `GenerateState`.

The default rollout opens a client for its own event loop and puts it on `args`. A user's rollout function has loops of
its own (`asyncio.run`, a worker's thread, `event_loop.run`): there the first `generate` opens a client, which is closed
when the loop ends.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import threading
import time
import weakref
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fusionrl.config.engine_groups import has_pairs
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.client import GenerateClient
from fusionrl.rollout.event_loop import LoopSemaphore, close_with_loop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fusionrl.data.processor import Processor

logger = logging.getLogger(__name__)

MOST_REQUESTS = 512  # for each engine, where `args` do not say
_Ends = tuple[str, tuple[str, ...]]
# A rollout and a concurrent evaluation may share a loop, and have different engines.
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Ends, GenerateClient]] = (
    weakref.WeakKeyDictionary()
)
_current: list[Namespace] = []  # the `args` of the default rollout that is open, and of a concurrent evaluation
_own: ContextVar[Namespace | None] = ContextVar("own", default=None)  # the one of these that the code runs in


def sampling_params(args: Namespace) -> dict[str, Any]:
    """SGLang's sampling parameters of a rollout, from the flags."""
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "min_new_tokens": args.rollout_min_response_len,
        "ignore_eos": args.rollout_ignore_eos,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
    }
    if args.rollout_stop:
        params["stop"] = list(args.rollout_stop)
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = list(args.rollout_stop_token_ids)
    return params


def get_rollout_num_engines(args: Namespace) -> int:
    """Return the number of the policy's engines behind the router; 0 if there are none."""
    if (num_engines := getattr(args, "rollout_num_engines", None)) is not None:
        return int(num_engines)
    if urls := getattr(args, "engine_urls", None):
        return len(urls)
    num_gpus = getattr(args, "rollout_num_gpus", None) or 0
    return max(1, num_gpus // (getattr(args, "rollout_num_gpus_per_engine", None) or 1)) if num_gpus > 0 else 0


def request_limit(args: Namespace) -> int:
    """Return how many requests may be under way at once."""
    engines = getattr(args, "engine_urls", None) or ()
    return int(getattr(args, "sglang_server_concurrency", MOST_REQUESTS) * max(1, len(engines)))


def new_client(args: Namespace) -> GenerateClient:
    """Open a client of the engines for the event loop that uses it."""
    media = None
    if IMAGES.processor is not None:
        from fusionrl.rollout.image_requests import media_tokens

        media = media_tokens()
    return GenerateClient(
        args.router_url,
        args.api_key,
        timeout_s=3600.0,
        max_connections=request_limit(args),
        vocab_size=args.vocab_size,  # a larger id would kill the server
        media=media,
        stream_responses=args.stream_responses,
        # The router drops the request for experts.
        worker_urls=args.engine_urls if getattr(args, "routed_experts_size", None) else (),
        engine_urls=() if has_pairs(getattr(args, "engine_group", ())) else args.engine_urls,
        adds_seeds=not getattr(args, "rollout_external_engine_addrs", None),
        least_version=lambda: getattr(args, "pushed_version", None),
    )


def client_of(args: Namespace) -> GenerateClient:
    """Return the client for the running event loop; where `args` have none for it, one that closes with the loop."""
    client: GenerateClient | None = getattr(args, "generate_client", None)
    loop = asyncio.get_running_loop()
    is_of_loop = getattr(args, "client_loop", None) in (None, loop) or not getattr(args, "router_url", None)
    if client is not None and is_of_loop:
        return client
    assert getattr(args, "router_url", None), "args.generate_client is set within a rollout"
    ends = (args.router_url, tuple(args.engine_urls))
    held = _clients.setdefault(loop, {})
    if ends not in held:
        held[ends] = new_client(args)
        close_with_loop(held[ends].close)
    return held[ends]


def semaphore_of(args: Namespace) -> LoopSemaphore:
    """Return the limit of samples under way; `args` keep it."""
    semaphore: LoopSemaphore | None = getattr(args, "semaphore", None)
    if semaphore is None:
        semaphore = args.semaphore = LoopSemaphore(request_limit(args))
    return semaphore


@contextmanager
def rollout_open(args: Namespace) -> Iterator[None]:
    """Say whose `args` are the current ones while the default rollout, or an evaluation, is under way."""
    _current.append(args)
    token = _own.set(args)
    try:
        yield
    finally:
        _own.reset(token)
        _current.remove(args)
        args.is_stopping = None


def is_stopping(args: Namespace) -> bool:
    """Return whether the rollout has ended: the default one, or a user's that called `abort`."""
    if (is_set := getattr(args, "is_stopping", None)) is not None:
        return bool(is_set())
    state = vars(args).get("generate_state")
    return state is not None and state.aborted


class GenerateState:
    """State that generate functions share: tokenizer, sampling parameters, limit of concurrent requests.

    One object for each rollout's `args`: `GenerateState(args)` gives the same one again. One that a module keeps
    works in later rollouts too, and from any event loop.

    tokenizer             of --hf-checkpoint
    processor             of a model that sees, with the run's sizes of images; None: of one of text alone
    semaphore             the rollout's; a new one where `args` has none (outside a rollout)
    sampling_params       SGLang's, from the flags
    aborted               the rollout has enough samples, and what remains is being stopped
    pendings              tasks of `submit_generate_tasks`; a user's rollout function takes them from here
    remaining_batch_size  groups submitted; the code that drops one counts it down
    """

    def __new__(cls, args: Namespace) -> GenerateState:
        return vars(args).get("generate_state") or super().__new__(cls)

    def __init__(self, args: Namespace) -> None:
        if vars(args).get("generate_state") is self:
            return
        self.args = args
        self.sampling_params, self.semaphore = sampling_params(args), semaphore_of(args)
        self.dp_rank, self.dp_counts = 0, [0]
        self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.reset()
        args.generate_state = self

    def __deepcopy__(self, memo: dict[int, object]) -> GenerateState:
        return self

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.args.hf_checkpoint)

    @functools.cached_property
    def processor(self) -> Processor | None:
        """Make it at its first use."""
        from fusionrl.data.processor import load_processor

        return load_processor(self.args.hf_checkpoint)

    @property
    def aborted(self) -> bool:
        """Return whether the rollout has enough samples and the remaining requests are being stopped."""
        # A state that a module keeps belongs to an earlier rollout's `args`; it reports on the one that is open.
        args = _own.get() or (_current[-1] if _current else self.args)
        is_stopping = getattr(args, "is_stopping", None) or getattr(self.args, "is_stopping", None)
        return self._is_aborted or bool(is_stopping is not None and is_stopping())

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._is_aborted = value

    def reset(self) -> None:
        """Forget the tasks and the abort: for the next rollout."""
        self.pendings: set[asyncio.Task[Any]] = set()
        self.remaining_batch_size, self._is_aborted = 0, False

    def submit_generate_tasks(self, samples: Sequence[list[Sample]]) -> None:
        """Start `generate_and_rm_group` for each group; the tasks are in `pendings`."""
        from fusionrl.rollout import sglang_rollout  # which imports this module

        for group in samples:
            group_samples = sglang_rollout.generate_and_rm_group(self.args, group, dict(self.sampling_params))
            self.pendings.add(asyncio.create_task(group_samples))
        self.remaining_batch_size += len(samples)

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Choose a data-parallel rank of an engine: always 0, as the engines choose for themselves."""
        yield self.dp_rank


METRICS = """
rollout/answers_refused | answers | Responses of engines that did not match their request (docs/guides/security.md);
    each request was sent again. | when it happens
rollout/requests_retried | requests | Requests that were sent again, by the client and the router. |
    --use-fault-tolerance
rollout/tokens_kept | tokens | Tokens of engines that died which another engine continued. | --use-fault-tolerance
eval/answers_refused | answers | As rollout/answers_refused. | when it happens
eval/requests_retried | requests | As rollout/requests_retried. | --use-fault-tolerance
eval/tokens_kept | tokens | As rollout/tokens_kept. | --use-fault-tolerance
"""


@asynccontextmanager
async def rollout_client(args: Namespace) -> AsyncIterator[GenerateClient]:
    """Open the client and the concurrency limit of one rollout, and put both on its `args`, where hooks find them."""
    args.semaphore = LoopSemaphore(request_limit(args))
    args.generate_client = client = new_client(args)
    args.client_loop = asyncio.get_running_loop()
    try:
        with rollout_open(args):
            yield client
    finally:
        await client.close()


def request_counts(args: Namespace, client: GenerateClient, prefix: str) -> dict[str, float]:
    """Count the answers that were refused, where there were any; with --use-fault-tolerance also what was sent again,
    and what was kept of engines that died.
    """
    counts: dict[str, float] = {}
    if args.use_fault_tolerance:
        counts[f"{prefix}/requests_retried"] = client.num_retries
        counts[f"{prefix}/tokens_kept"] = client.num_tokens_kept
    if client.num_answers_refused:
        counts[f"{prefix}/answers_refused"] = client.num_answers_refused
    return counts


GENERATED, SCORED = "generated", "scored"


class SamplesInFlight:
    """Counts samples. Thread-safe: a stream and an evaluation may be at work at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._now: dict[object, tuple[str, int | None, float]] = {}
        self._num_scored = self._num_tokens = 0

    @contextmanager
    def note(self, stage: str, sample: Sample) -> Iterator[None]:
        """Note within the block that the sample is generated, or scored."""
        key = object()
        with self._lock:
            self._now[key] = (stage, sample.index, self._clock())
        try:
            yield
        finally:
            with self._lock:
                del self._now[key]

    def scored(self, sample: Sample) -> None:
        with self._lock:
            self._num_scored += 1
            self._num_tokens += sample.response_length

    def describe(self) -> str:
        """Return the counts in words; "" if no sample is in flight."""
        with self._lock:
            now, num_scored, num_tokens = list(self._now.values()), self._num_scored, self._num_tokens
        texts = []
        for stage in (GENERATED, SCORED):
            samples = [(since, index) for kind, index, since in now if kind == stage]
            if samples:
                since, index = min(samples, key=lambda entry: entry[0])
                oldest = f"{'one' if index is None else f'sample {index}'} for {self._clock() - since:.0f} s"
                noun = "samples are" if len(samples) > 1 else "sample is"
                texts.append(f"{len(samples)} {noun} being {stage} ({oldest})")
        ends = f"{num_scored} are finished since the start, with {num_tokens} tokens"
        return f"{', '.join(texts)}; {ends}" if texts else ""


samples_in_flight = SamplesInFlight()  # of this process


TIMED_OUT = "timed_out"  # in the metadata of a sample: the time limit that it passed, in seconds


_GRACE_S = 5.0  # for a function to end when it is cancelled


async def within(
    limit_s: float, sample: Sample, making: Coroutine[Any, Any, Sample | list[Sample]]
) -> Sample | list[Sample]:
    """Return what `making` makes of a sample; after `limit_s` another sample, as it was before, FAILED."""
    blank = copy.deepcopy(sample)
    task = asyncio.ensure_future(making)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            return task.result()
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE_S)  # it still uses the client, which is closed after this
        raise
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=_GRACE_S)
    if done and not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("sample %s raised when it was ended: %s", sample.index, error)  # the limit is the cause
    more = "" if done else "; its function does not end, and is left to itself"
    logger.warning(
        "--sample-timeout %g: sample %s is not finished; it is not trained on%s", limit_s, sample.index, more
    )
    if not blank.num_tokens and blank.prompt_tokens is not None:
        blank.tokens = blank.prompt_tokens
    blank.metadata = {**(blank.metadata or {}), TIMED_OUT: limit_s}
    blank.status = Sample.Status.FAILED
    return blank
