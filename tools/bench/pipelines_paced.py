"""One pipeline over paced engines: the real router, Buffer and controller; trainers and pushes are sleeps.

See `tools/bench/pipelines.py`, whose part (b) this is.
"""

import asyncio
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from fusionrl.buffer.actor import BufferActor, EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.config.pipeline import pause_mode
from fusionrl.engines.router import Router
from fusionrl.models.shape import read_model_shape
from fusionrl.pipeline.knobs import IN_TURN
from fusionrl.plan.plan import make_plan
from tools.bench.lengths import Lengths

ROOT = Path(__file__).resolve().parents[2]
BATCHES_AFTER = 8  # that are never trained: nothing runs dry before the last step
_PROBE_S = 0.01


@dataclass(frozen=True)
class Setting:
    """The modelled cluster and task; seconds and tokens are modelled ones.

    engines, gpus  engines, and the devices of each
    update_s       of one optimizer pass over a batch of mean length
    log_probs_s    of one forward pass over it, where the pipeline needs log-probs of the weights before the step
    push_s         in which the engines are paused
    weight         modelled samples for each sample here: 512 prompts of 16 samples are a batch

    The seconds of training are verl's with 64 devices, from its 64:64 run and its synchronous one. The control plane's
    own time is not scaled, so few samples on a slow clock come nearer to the truth than many on a fast one.
    """

    engines: int = 64
    gpus: int = 1
    prompts: int = 32
    samples: int = 16
    weight: float = 16.0
    update_s: float = 113.0
    log_probs_s: float = 70.0
    push_s: float = 5.0
    time_scale: float = 0.08
    token_scale: float = 0.02
    max_running: int = 256
    lengths: Lengths = field(default_factory=Lengths)

    @property
    def batch(self) -> int:
        """Return the samples of a batch."""
        return self.prompts * self.samples


@dataclass(frozen=True)
class Row:
    """A line of the table: a pipeline, with changes of its flags and of the setting."""

    name: str
    pipeline: str
    flags: dict[str, Any] = field(default_factory=dict)
    parts: int = 1  # rollouts that are fetched and trained one after the other between two pushes, a batch together
    log_probs: bool = False  # they are computed again, by the weights before each step
    setting: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """Modelled seconds of one step, its tokens, and their staleness in pushes."""

    seconds: float = 0.0
    wait_s: float = 0.0
    train_s: float = 0.0
    log_probs_s: float = 0.0
    drain_s: float = 0.0
    push_s: float = 0.0
    tokens: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: float = 0.0


@contextmanager
def paced_engines(setting: Setting) -> Iterator[list[str]]:
    """Start the engines in a process of their own."""
    lengths = setting.lengths
    flags = {"engines": setting.engines, "gpus": setting.gpus, "max_running": setting.max_running}
    flags |= {"time_scale": setting.time_scale, "token_scale": setting.token_scale, "weight": setting.weight}
    flags |= {"median": lengths.median, "sigma": lengths.sigma, "longest": lengths.longest}
    flags |= {"prompt": lengths.prompt, "seed": lengths.seed}
    command = [sys.executable, "-m", "tools.bench.paced_engine"]
    for name, value in flags.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


@contextmanager
def routed(urls: list[str], folder: Path) -> Iterator[Router]:
    """Start the router as a run does, and register all engines."""
    router = Router("127.0.0.1", str(folder))
    try:
        router.start()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(router.add_worker, urls))
        yield router
    finally:
        router.shutdown()


class LoopProbe:
    """The longest time for which an event loop did nothing else: how much too late a sleep in it ended."""

    def __init__(self) -> None:
        self.largest_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch a loop of another thread."""
        loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(_PROBE_S)
            self.largest_s = max(self.largest_s, time.perf_counter() - start - _PROBE_S)


class Engines:
    """The driver's end of the engines: pushes, and what they report."""

    def __init__(self, urls: list[str], setting: Setting) -> None:
        self._urls, self._setting = urls, setting

    async def push(self, version: int, mode: str) -> None:
        """Pause all engines, let the modelled time of a push pass, and resume with the new weights."""
        due = time.perf_counter() + self._setting.push_s * self._setting.time_scale
        async with aiohttp.ClientSession() as session:
            await self._all(session, "pause_generation", {"mode": mode})
            update = {"model_path": "paced", "weight_version": str(version)}
            await self._all(session, "update_weights_from_disk", update)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self._all(session, "continue_generation", {})

    async def pause(self, mode: str) -> None:
        """Stop all engines."""
        async with aiohttp.ClientSession() as session:
            await self._all(session, "pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Resume all engines."""
        async with aiohttp.ClientSession() as session:
            await self._all(session, "continue_generation", {})

    async def _all(self, session: aiohttp.ClientSession, path: str, body: dict[str, str]) -> None:
        async def post(url: str) -> None:
            async with session.post(f"{url}/{path}", json=body) as response:
                response.raise_for_status()

        await asyncio.gather(*(post(url) for url in self._urls))

    async def report(self) -> dict[str, Any]:
        """Return the sums over all engines."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._urls[0]}/report") as response:
            report = await response.json()
        names = report["engines"][0]
        totals = {name: sum(engine[name] for engine in report["engines"]) for name in names}
        return totals | {
            "cpu_s": report["cpu_s"],
            "most_in_flight": max(engine["most_in_flight"] for engine in report["engines"]),
            "latest_s": max(engine["latest_s"] for engine in report["engines"]),
        }


def score(args: Any, sample: Any, *, rollout_id: int, evaluation: bool) -> Any:
    """Set a reward that costs nothing and differs within a group (--rollout-sample-hook-path)."""
    sample.reward = float(sample.index % 2)
    return sample


def make_buffer(
    setting: Setting, row: Row, num_steps: int, model: Path, folder: Path, endpoints: EngineEndpoints
) -> BufferActor:
    """Return the Buffer of a run, with its prompts read."""
    data, num_prompts = folder / "prompts.jsonl", (num_steps + BATCHES_AFTER) * setting.prompts
    # Unlike from their beginning: the router sends prompts that begin alike to one engine.
    prompts = [hashlib.md5(str(number).encode()).hexdigest()[:12] for number in range(num_prompts)]
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    longest = max(65, round(setting.lengths.longest * setting.token_scale))  # shorter ones would share requests
    values = {
        "hf_checkpoint": str(model),
        "prompt_data": str(data),
        "input_key": "prompt",
        "rollout_sample_hook_path": [f"{Path(__file__).resolve()}:score"],
        "rm_type": "random",  # never asked: the hook sets the reward
        "rollout_batch_size": setting.prompts // row.parts,
        "n_samples_per_prompt": setting.samples,
        "rollout_max_response_len": longest,
        "max_tokens_per_gpu": 4 * longest,
        "num_rollout": (num_steps + BATCHES_AFTER) * row.parts,
        "rollout_num_gpus": setting.engines,
        "sglang_server_concurrency": max(1, round(setting.max_running / setting.weight)),
        "pipeline": row.pipeline,
    }
    if row.parts > 1:
        values["update_weights_interval"] = row.parts
    config = Config.from_flat(values | row.flags)
    plan = make_plan(config, read_model_shape(model), device="cpu", num_prompts=num_prompts)
    buffer = BufferActor(config, plan, str(folder / "run"), 1, put=lambda shard: shard)
    asyncio.run(buffer.setup(endpoints))
    return buffer


class PacedRun:
    """One pipeline from its first step to its last; every number in modelled seconds."""

    def __init__(self, setting: Setting, row: Row, buffer: BufferActor, engines: Engines) -> None:
        self._setting, self._row, self._buffer, self._engines = setting, row, buffer, engines
        self._is_streamed = row.pipeline != IN_TURN
        self._mode = pause_mode(buffer.config, buffer.plan.knobs)
        self._mean = setting.lengths.mean() * setting.batch
        self.steps: list[Step] = []
        self.probe = LoopProbe()

    @contextmanager
    def open(self, push: bool = True) -> Iterator[Callable[[int], None]]:
        """Begin to generate; yields the function of one step, and ends what is under way at the end."""
        if push:
            asyncio.run(self._engines.push(0, self._mode))
        if self._is_streamed:
            asyncio.run(self._buffer.begin_stream(0))
            self.probe.begin(self._buffer._stream._loop)
        try:
            yield lambda number: self.steps.append(self._step(number))
        finally:
            if self._is_streamed:
                asyncio.run(self._buffer.end_stream())

    def retries(self) -> int:
        """Return how many requests the stream's client has sent again."""
        return self._buffer._stream._client._client.num_retries

    def _step(self, number: int) -> Step:
        step, start = Step(), time.perf_counter()
        for part in range(self._row.parts):
            is_due = self._train(number * self._row.parts + part, step)
        assert is_due
        version, now = (number + 1) * self._row.parts, time.perf_counter()
        asyncio.run(self._engines.push(version, self._mode))
        step.push_s = self._since(now)
        if self._is_streamed:
            asyncio.run(self._buffer.weights_pushed(version))
        step.seconds = self._since(start)
        return step

    def _train(self, rollout_id: int, step: Step) -> bool:
        """Take one rollout and train it; returns whether a push is due, which may begin."""
        start = time.perf_counter()
        streamed, buffer = self._is_streamed, self._buffer
        rollout = asyncio.run(buffer.next_rollout(rollout_id) if streamed else buffer.generate(rollout_id, rollout_id))
        step.wait_s += self._since(start)
        tokens = rollout.metrics["rollout/num_tokens"] / self._setting.token_scale
        step.tokens += tokens
        for name in ("mean", "max"):
            # In pushes; the metric counts rollouts.
            staleness = rollout.metrics.get(f"rollout/staleness/token_{name}", 0.0) / self._row.parts
            setattr(step, f"staleness_{name}", max(getattr(step, f"staleness_{name}"), staleness))
        share, start = tokens / self._mean, time.perf_counter()
        self._sleep(self._setting.log_probs_s * share if self._row.log_probs else 0.0)
        step.log_probs_s += self._since(start)
        start = time.perf_counter()
        self._sleep(self._setting.update_s * share)
        step.train_s += self._since(start)
        start = time.perf_counter()
        is_due = asyncio.run(buffer.rollout_trained()) if streamed else True
        step.drain_s += self._since(start)
        return is_due

    def _since(self, start: float) -> float:
        return (time.perf_counter() - start) / self._setting.time_scale

    def _sleep(self, modelled_s: float) -> None:
        time.sleep(modelled_s * self._setting.time_scale)


@dataclass
class CpuClock:
    """CPU seconds of this process (Buffer, client, answer parsers) and of the router."""

    router: psutil.Process

    def now(self) -> dict[str, float]:
        """Return the seconds so far."""
        this_process, times = psutil.Process(), 0.0
        for process in (this_process, *this_process.children(recursive=True)):
            if "fusionrl.engines.parser_processes" in process.cmdline():
                times += sum(process.cpu_times()[:2])
        return {"buffer": time.process_time() + times, "router": sum(self.router.cpu_times()[:2])}


@contextmanager
def opened(setting: Setting, row: Row, num_steps: int, model: Path) -> Iterator[tuple[PacedRun, Engines, CpuClock]]:
    """Start engines, router and Buffer of one run, and end them."""
    with tempfile.TemporaryDirectory() as name, paced_engines(setting) as urls:
        folder = Path(name)
        with routed(urls, folder) as router:
            engines = Engines(urls, setting)
            buffer = make_buffer(setting, row, num_steps, model, folder, EngineEndpoints(router.url, tuple(urls)))
            assert router._process is not None
            clock = CpuClock(psutil.Process(router._process.pid))
            yield PacedRun(setting, row, buffer, engines), engines, clock


def run_row(setting: Setting, row: Row, num_steps: int, warm_up: int, model: Path) -> dict[str, Any]:
    """Run one pipeline with engines, router and Buffer of its own; returns its figures of the steps after `warm_up`."""
    setting = replace(setting, **row.setting)
    warm_up = warm_up if row.pipeline != IN_TURN else min(1, warm_up)  # there each step is like the other
    with opened(setting, row, warm_up + num_steps, model) as (run, engines, clock), run.open() as step:
        for number in range(warm_up):
            step(number)
        before, cpu = asyncio.run(engines.report()), clock.now()
        for number in range(warm_up, warm_up + num_steps):
            step(number)
        after = asyncio.run(engines.report())
        used = {name: seconds - cpu[name] for name, seconds in clock.now().items()}
    worked = {name: value - before[name] for name, value in after.items()}
    worked |= {name: after[name] for name in ("latest_s", "most_in_flight")}  # the largest, of all steps
    return figures(setting, row, run, run.steps[warm_up:], worked, used)


def figures(
    setting: Setting, row: Row, run: PacedRun, steps: list[Step], worked: dict[str, Any], used: dict[str, float]
) -> dict[str, Any]:
    """Return a row of the table; times are modelled seconds, and real ones where the name says CPU, delay or late."""
    thousands = len(steps) * setting.batch / 1000
    mean = {name: statistics.fmean(asdict(step)[name] for step in steps) for name in asdict(steps[0])}
    return {
        "name": row.name,
        "pipeline": row.pipeline,
        "flags": row.flags,
        "engines": setting.engines,
        "step_s": mean["seconds"],
        "wait_s": mean["wait_s"],
        "log_probs_s": mean["log_probs_s"],
        "train_s": mean["train_s"],
        "drain_s": mean["drain_s"],
        "push_s": mean["push_s"],
        "engines_idle": 1 - worked["busy_s"] / worked["seconds"],
        "running_per_engine": setting.weight * worked["running_s"] / worked["seconds"],
        "trainers_idle": 1 - (mean["train_s"] + mean["log_probs_s"]) / mean["seconds"],
        "staleness": mean["staleness_mean"],
        "staleness_max": max(step.staleness_max for step in steps),
        "tokens_per_step": mean["tokens"] * setting.weight,
        "tokens_prefilled_again": worked["tokens_prefilled_again"] * setting.weight / len(steps),
        "buffer_cpu_s_per_1000": used["buffer"] / thousands,
        "router_cpu_s_per_1000": used["router"] / thousands,
        "engines_cpu_s_per_1000": worked["cpu_s"] / thousands,
        "loop_delay_s": run.probe.largest_s if row.pipeline != IN_TURN else None,
        "engines_late_s": worked["latest_s"],
        "most_per_engine": worked["most_in_flight"],
        "steps": [asdict(step) for step in steps],
    }
