"""Load of the control plane: the client, the Buffer and its train shards under engines that only keep a pace.

    python -m tools.bench.load [--in-flight 19500] [--rates 250 500 1000 2000] [--seconds 20] [--json FILE]
    python -m tools.bench.load --in-flight 4000 --rates 500 --profile FILE

The Buffer is the real one, a Ray actor with the stream, and the command takes its batches as a driver does: it pulls
the shards of each, and reports a push that did not take place. `load_engines.py` takes the requests and answers them
at each rate in turn; a rate at which the Buffer falls behind is the last. `--router` puts the real router between them.

The table has, for each rate: samples a second, requests in flight, groups that are ready, how late the Buffer's event
loop runs a timer (ms), and CPU seconds for 1,000 samples. Memory is that of the Buffer with its helpers, in bytes a
sample, while the requests are under way, and when all are answered and none is taken. `--profile` writes what the
stream's thread and the making of batches called, with times that profiling makes two to three times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import hashlib
import io
import json
import os
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fusionrl.base.process import raise_open_files
from fusionrl.buffer.collect import EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import Plan, make_plan
from fusionrl.rollout.generate_state import samples_in_flight
from fusionrl.runtime.ray_cluster import start_ray
from fusionrl.runtime.worker_actors import BufferWorker, ProcessSettings
from tests.engines.long_answers import VOCAB_SIZE
from tests.tiny_model import make_tiny_qwen3
from tools.bench.pipelines_paced import ROOT, routed

PROMPTS, SAMPLES = 64, 16  # of a batch
_PROBE_S = 0.01
_COLUMNS = ("offered", "samples_s", "in_flight", "ready", "p50", "p99", "max")
PHASES = ("stream", "batches", "rest", "helpers", "router", "engines")


class MeasuredBuffer(BufferWorker):
    """The Buffer's process, which also tells what it costs."""

    def __init__(self, config: Config, plan: Plan, run_dir: str) -> None:
        super().__init__(config, plan, run_dir, 1, f"{run_dir}/logs/buffer.a1.log", ProcessSettings(0o022))
        self._delays: list[float] = []
        self._profiles: list[cProfile.Profile] = []

    async def begin(self) -> None:
        """Begin the stream, and watch its event loop."""
        await self.begin_stream(0)
        asyncio.run_coroutine_threadsafe(self._watch(), self._running._loop)

    async def _watch(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(_PROBE_S)
            self._delays.append(time.perf_counter() - start - _PROBE_S)

    async def profile(self) -> None:
        """Count from now on what the stream and the making of batches call."""
        self._profiles = [cProfile.Profile(), cProfile.Profile()]
        self._running._loop.call_soon_threadsafe(self._profiles[0].enable)
        made = self._stages.make_of
        self._stages.make_of = lambda *args: self._profiles[1].runcall(made, *args)  # type: ignore[method-assign]

    async def profiled(self) -> str:
        """Return the functions that took the most time."""
        self._running._loop.call_soon_threadsafe(self._profiles[0].disable)
        await asyncio.sleep(1)
        text = io.StringIO()
        for name, profile in zip(PHASES, self._profiles, strict=False):
            text.write(f"\n{name}\n")
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(60)
        return text.getvalue()

    async def measure(self) -> dict[str, Any]:
        """Return counts of now, memory, CPU seconds so far, and the delays since the last call."""
        process, names = psutil.Process(), {thread.native_id: thread.name for thread in threading.enumerate()}
        cpu = dict.fromkeys(PHASES[:4], 0.0)
        for thread in process.threads():
            name = names.get(thread.id, "")
            phase = "stream" if name == "stream" else "batches" if name.startswith(("asyncio_", "uvloop_")) else "rest"
            cpu[phase] += thread.user_time + thread.system_time
        memory = process.memory_info().rss
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                memory, times = memory + child.memory_info().rss, child.cpu_times()
                cpu["helpers"] += times.user + times.system
        delays, self._delays = self._delays, []
        facts = {"scored": samples_in_flight._num_scored}
        if self._stream is not None:
            state = self._stream.state
            counts = self._stream._call(lambda: (state.samples_in_flight, len(state.of("ready"))))
            facts |= {"in_flight": counts[0], "ready": counts[1]}
        return facts | {"memory": memory, "cpu": cpu, "delays": delays, "time": time.perf_counter()}


class Engines:
    """The process of `load_engines`."""

    def __init__(self, num_tokens: int) -> None:
        command = [sys.executable, "-m", "tools.bench.load_engines", "--tokens", str(num_tokens)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert self._process.stdout is not None and self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        self.url = f"http://127.0.0.1:{int(self._out.readline())}"

    def tell(self, **wanted: float) -> dict[str, float]:
        """Change rate or version; returns the requests that it holds, its answers and CPU seconds so far."""
        self._in.write(json.dumps(wanted) + "\n")
        self._in.flush()
        return json.loads(self._out.readline())

    def close(self) -> None:
        self._in.close()
        self._process.wait()


def make_config(options: argparse.Namespace, model: Path, data: Path) -> tuple[Config, Plan]:
    """Return a run's configuration in which so many requests are under way."""
    lead = -(-options.in_flight // (PROMPTS * SAMPLES)) + 1
    count = (lead + 4) * PROMPTS
    prompts = [hashlib.md5(b"%d" % number).hexdigest()[:12] for number in range(count)]
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    values: dict[str, object] = {
        "hf_checkpoint": str(model),
        "prompt_data": str(data),
        "input_key": "prompt",
        "rollout_sample_hook_path": [f"{ROOT}/tools/bench/pipelines_paced.py:score"],
        "rm_type": "random",  # never asked: the hook sets the reward
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES,
        "rollout_max_response_len": options.tokens,
        "max_tokens_per_gpu": 16 * options.tokens,
        "num_rollout": 1_000_000,
        "rollout_num_gpus": 1,
        "sglang_server_concurrency": options.in_flight,
        "pipeline": "async-partial",
        "max_staleness": 2 * lead,
        "admission_lead": float(lead),
    }
    config = Config.from_flat(values)
    shape = read_model_shape(model).model_copy(update={"vocab_size": VOCAB_SIZE})
    return config, make_plan(config, shape, device="cpu", num_prompts=count)


class Load:
    """One Buffer under load, from its first request on."""

    def __init__(self, buffer: Any, engines: Engines, router: psutil.Process | None) -> None:
        import ray

        self._get, self._buffer, self._engines, self._router = ray.get, buffer, engines, router
        self._num_batches = 0

    def fill(self, wanted: int) -> dict[str, Any]:
        """Let so many requests be sent; returns the cost of sending, and of holding, one of them."""
        empty = self._get(self._buffer.measure.remote())
        self._get(self._buffer.begin.remote())
        while self._engines.tell()["held"] < wanted:
            time.sleep(0.2)
        full = self._get(self._buffer.measure.remote())
        passed, sent = full["time"] - empty["time"], full["in_flight"]
        cpu = sum(full["cpu"][name] - empty["cpu"][name] for name in ("stream", "helpers")) / sent * 1000
        self._empty = empty["memory"]
        memory = (full["memory"] - self._empty) / sent
        return {"in_flight": sent, "sent_s": sent / passed, "cpu_per_1000": cpu, "bytes_each": memory}

    def take_batch(self) -> dict[str, float]:
        """Train the next batch, in no time; returns its metrics."""
        rollout = self._get(self._buffer.next_rollout.remote(self._num_batches))
        assert sum(shard.num_samples for shard in self._get(rollout.shards)) == PROMPTS * SAMPLES
        self._num_batches += 1
        if self._get(self._buffer.rollout_trained.remote()):
            self._engines.tell(version=self._num_batches)
            self._get(self._buffer.weights_pushed.remote(self._num_batches))
        return rollout.metrics

    def at_rate(self, rate: float, seconds: float) -> dict[str, Any]:
        """Offer so many answers a second; returns a row of the table."""
        self._engines.tell(rate=rate)
        for _ in range(2):  # the pace is found
            self.take_batch()
        before, engines = self._now()
        num_batches = max(2, round(rate * seconds / (PROMPTS * SAMPLES)))
        batches = [self.take_batch() for _ in range(num_batches)]
        after, engines_after = self._now()
        while after["scored"] == before["scored"]:  # on a slow machine all these batches may have been ready before
            batches.append(self.take_batch())
            delays = after["delays"]
            after, engines_after = self._now()
            after["delays"] += delays
        passed, scored = after["time"] - before["time"], after["scored"] - before["scored"]
        cpu = {name: (after["cpu"][name] - before["cpu"][name]) / scored * 1000 for name in after["cpu"]}
        cpu["engines"] = (engines_after["cpu_s"] - engines["cpu_s"]) / scored * 1000
        late = dict(zip(("p50", "p99", "max"), 1000 * np.percentile(after["delays"], (50, 99, 100)), strict=True))
        means = {name: np.mean([batch[f"pipeline/{name}"] for batch in batches]) for name in ("in_flight", "ready")}
        return {"offered": rate, "samples_s": scored / passed, **means, **late, "cpu": cpu, "memory": after["memory"]}

    def _now(self) -> tuple[dict[str, Any], dict[str, float]]:
        facts = self._get(self._buffer.measure.remote())
        if self._router is not None:
            facts["cpu"]["router"] = sum(self._router.cpu_times()[:2])
        return facts, self._engines.tell()

    def finish(self) -> dict[str, float]:
        """Let every request be answered, and take none; returns what a finished sample holds."""
        self._engines.tell(rate=1e9)
        while (facts := self._now()[0])["in_flight"]:
            time.sleep(0.2)
        count = facts["ready"] * SAMPLES
        return {"finished": count, "bytes_each": (facts["memory"] - self._empty) / count}


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[Load, Any]]:
    """Start engines, Ray and the Buffer, and end them."""
    import ray

    raise_open_files()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        config, plan = make_config(options, make_tiny_qwen3(folder / "model", seed=0), folder / "prompts.jsonl")
        engines = Engines(options.tokens)
        ends.callback(engines.close)
        url, router = engines.url, None
        if options.router:
            started = ends.enter_context(routed([url], folder))
            assert started._process is not None
            url, router = started.url, psutil.Process(started._process.pid)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        start_ray("cpu", 0, address=None, dashboard=False)
        ends.callback(ray.shutdown)
        buffer = ray.remote(num_cpus=0, max_concurrency=16)(MeasuredBuffer).remote(config, plan, str(folder / "run"))
        ray.get(buffer.setup.remote(EngineEndpoints(url, (engines.url,))))
        yield Load(buffer, engines, router), buffer


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    names = [name for name in PHASES if any(name in row["cpu"] for row in rows)]
    heads = ["offered", "samples/s", "in flight", "groups ready", "delay p50", "p99", "max", *names, "CPU"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [f"{row[name]:,.0f}" for name in _COLUMNS]
        cells += [f"{row['cpu'].get(name, 0):.2f}" for name in names] + [f"{sum(row['cpu'].values()):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--in-flight", type=int, default=19_500, help="requests; each is an open file")
    command.add_argument("--rates", type=float, nargs="+", default=[250, 500, 1000, 2000], help="answers a second")
    command.add_argument("--seconds", type=float, default=20.0, help="of each rate, if the Buffer keeps up")
    command.add_argument("--tokens", type=int, default=1000, help="of an answer")
    command.add_argument("--router", action="store_true", help="send requests through the router")
    command.add_argument("--profile", type=Path, help="write what the last rate spent its time on")
    command.add_argument("--json", type=Path, help="write the figures here as well")
    return command


def main() -> None:
    """Command line."""
    options = parser().parse_args()
    with opened(options) as (load, buffer):
        figures: dict[str, Any] = {"fill": load.fill(options.in_flight // SAMPLES * SAMPLES), "rates": []}
        print(f"{figures['fill']}; load {os.getloadavg()[0]:.1f}", flush=True)
        for rate in options.rates:
            if options.profile and rate == options.rates[-1]:
                load._get(buffer.profile.remote())
            figures["rates"].append(load.at_rate(rate, options.seconds))
            print(table(figures["rates"][-1:]), f"load {os.getloadavg()[0]:.1f}", flush=True)
            if figures["rates"][-1]["samples_s"] < 0.85 * rate:
                break
        if options.profile:
            options.profile.write_text(load._get(buffer.profiled.remote()))
        else:
            figures["finished"] = load.finish()
    print(figures["fill"], figures.get("finished"), table(figures["rates"]), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    from tools.bench.load import main as run  # the actor's process imports this module by its name

    run()
