"""Measure the way of samples from the engines' HTTP answers to a trainer: samples a second, peak memory, who works.

    python tools/bench/buffer.py [--samples 2048 8192] [--tokens 4096] [--ranks 1]

A process answers `/generate` at once with answers as SGLang writes them: random tokens of a vocabulary of 150,000,
their log-probs, text. From there on everything is a run's own: the Buffer's actor with the default rollout, the file
under `rollouts/`, the train shards, Ray's object store, and an actor in the trainers' place that is handed every shard.
Rewards are set by a hook and cost nothing. What arrives is compared with what was sent.

The payload is the arrays of the shards. Memory is proportional set size (a page that two processes share counts once),
looked at every 0.1 s: of the Buffer with all that it started, of the object store and of the receiving actor. CPU
seconds are those of the Buffer's process, and of its helpers. Exits with 1 if the largest size takes over --max-memory
payloads, or over 1.1 times its share of the smallest one's time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import ray
from aiohttp import web

from fusionrl.buffer.actor import EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import make_plan
from fusionrl.runtime.actor_process import ProcessSettings
from fusionrl.runtime.ray_cluster import actor_on, start_ray
from fusionrl.runtime.worker_actors import BufferWorker

ROOT = Path(__file__).resolve().parents[2]
NUM_ANSWERS = 64  # different ones; they are given in turn
VOCAB_SIZE = 150_000
GROUP = 8
GROWTH = 1.1  # of seconds over samples


# ------------------------------------------------------------------------------------------------ the engine
def make_answer(number: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Tokens, log-probs, and the body of an answer that says them."""
    random = np.random.default_rng(number)
    tokens = random.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)
    log_probs = -random.exponential(0.5, num_tokens).astype(np.float32)
    meta = {
        "id": f"{number:032x}",
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": 6,
        "weight_version": "1",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs.tolist(), tokens.tolist(), strict=True)],
        "output_token_logprobs_length": num_tokens,
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "e2e_latency": 1.25,
    }
    text = "".join("abcdefghijklmnop"[t % 16] + "at " for t in tokens.tolist())
    return tokens, log_probs, orjson.dumps({"text": text, "output_ids": tokens.tolist(), "meta_info": meta})


def serve(num_tokens: int) -> None:
    """Answer until standard input ends; prints the port."""
    bodies = [make_answer(number, num_tokens)[2] for number in range(NUM_ANSWERS)]
    turns = itertools.cycle(bodies)

    async def generate(request: web.Request) -> web.Response:
        ids = orjson.loads(await request.read())["input_ids"]
        body = next(turns)
        if isinstance(ids[0], list):  # siblings with short answers share a request
            body = b"[" + b",".join([body, *(next(turns) for _ in ids[1:])]) + b"]"
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------ the run's ends
class Receiver:
    """Stand-in for the trainers that receives every shard."""

    def take(self, references: list[Any]) -> dict[str, Any]:
        """Bytes of the arrays, and sums of what was sampled."""
        shards = ray.get(references)
        arrays = [array for shard in shards for array in (*shard.fields.values(), shard.total_lengths)]
        sampled = [shard.fields["loss_mask"] > 0 for shard in shards]
        return {
            "bytes": sum(array.nbytes for array in arrays),
            "num_samples": sum(shard.num_samples for shard in shards),
            "num_sampled": int(sum(mask.sum() for mask in sampled)),
            "log_probs": float(sum(shard.fields["rollout_log_probs"].sum(dtype=np.float64) for shard in shards)),
            "tokens": int(sum(_response_tokens(shard).sum(dtype=np.int64) for shard in shards)),
        }


def _response_tokens(shard: Any) -> np.ndarray:
    parts = [t[len(t) - n :] for t, n in zip(shard.split("tokens"), shard.response_lengths, strict=True)]
    return np.concatenate(parts)


class MemoryWatch:
    """The most bytes that processes had at one time, of those and all that they started; and of the object store."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        raylets = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
        self._raylet = raylets[0]
        self.at_start = self.peak = self._look()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _look(self) -> int:
        total = _proportional(self._raylet.pid, "Pss_Shmem")
        for process in self._processes:
            for one in (process, *process.children(recursive=True)):
                total += _proportional(one.pid, "Pss")
        return total

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peak = max(self.peak, self._look())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _proportional(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))


# ------------------------------------------------------------------------------------------------ one size
@dataclass
class Figures:
    num_samples: int
    seconds: float
    payload_bytes: int
    start_bytes: int
    peak_bytes: int
    buffer_cpu_s: float
    helpers_cpu_s: float
    file_bytes: int

    def row(self) -> str:
        values = [
            f"{self.num_samples:,}",
            f"{self.seconds:.1f}",
            f"{self.num_samples / self.seconds:.0f}",
            f"{self.payload_bytes / 1e6:.0f}",
            f"{self.start_bytes / 1e6:.0f}",
            f"{self.peak_bytes / 1e6:.0f}",
            f"{self.peak_bytes / self.payload_bytes:.2f}",
            f"{self.buffer_cpu_s:.1f}",
            f"{self.helpers_cpu_s:.1f}",
            f"{self.file_bytes / 1e6:.0f}",
        ]
        return "| " + " | ".join(values) + " |"


COLUMNS = (
    "samples",
    "s",
    "samples/s",
    "payload MB",
    "start MB",
    "peak MB",
    "peak / payload",
    "Buffer CPU s",
    "helpers CPU s",
    "file MB",
)


def measure(num_samples: int, num_tokens: int, num_ranks: int, model: Path, url: str) -> Figures:
    """One rollout of a Buffer that has just been set up."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{i:05d}="}) + "\n" for i in range(num_samples // GROUP)))
        values = {
            "hf_checkpoint": str(model),
            "prompt_data": str(data),
            "input_key": "prompt",
            "rollout_sample_hook_path": [f"{Path(__file__).resolve().with_name('buffer_hook.py')}:score"],
            "rm_type": "random",  # never asked: the hook sets the reward
            "rollout_batch_size": num_samples // GROUP,
            "n_samples_per_prompt": GROUP,
            "rollout_max_response_len": num_tokens,
            "max_tokens_per_gpu": 4 * num_tokens,
            "num_rollout": 1,
            "actor_num_gpus_per_node": num_ranks,
        }
        config = Config.from_flat(values)
        shape = read_model_shape(model).model_copy(update={"vocab_size": VOCAB_SIZE})  # answers are checked against it
        plan = make_plan(config, shape, device="cpu", num_prompts=num_samples // GROUP)
        run_dir = Path(folder) / "run"
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        endpoints = EngineEndpoints(url, (url,), None)
        buffer = actor_on(BufferWorker, None, None, env=env).remote(
            config, plan, str(run_dir), 1, str(run_dir / "buffer.log"), ProcessSettings(0o077)
        )
        receiver = actor_on(Receiver, None, None, env=env).remote()
        ray.get(buffer.setup.remote(endpoints))
        pids = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in (buffer, receiver)]
        watch = MemoryWatch(pids)
        before = psutil.Process(pids[0]).cpu_times()
        start = time.perf_counter()
        rollout = ray.get(buffer.generate.remote(0))
        got = ray.get(receiver.take.remote(rollout.shards))
        seconds = time.perf_counter() - start
        watch.stop()
        after = psutil.Process(pids[0]).cpu_times()
        compare(got, num_samples, num_tokens)
        ray.kill(buffer)
        ray.kill(receiver)
        return Figures(
            num_samples=num_samples,
            seconds=seconds,
            payload_bytes=got["bytes"],
            start_bytes=watch.at_start,
            peak_bytes=watch.peak,
            buffer_cpu_s=after.user + after.system - before.user - before.system,
            helpers_cpu_s=after.children_user + after.children_system - before.children_user - before.children_system,
            file_bytes=sum(path.stat().st_size for path in run_dir.glob("rollouts/*.jsonl")),
        )


def compare(got: dict[str, Any], num_samples: int, num_tokens: int) -> None:
    """Raise AssertionError where what arrived is not what was sent."""
    answers = [make_answer(number, num_tokens) for number in range(NUM_ANSWERS)]
    times = num_samples // NUM_ANSWERS
    assert got["num_samples"] == num_samples, got
    assert got["num_sampled"] == num_samples * num_tokens, got
    assert got["tokens"] == times * sum(int(tokens.sum(dtype=np.int64)) for tokens, _, _ in answers), got
    sent = times * sum(float(log_probs.sum(dtype=np.float64)) for _, log_probs, _ in answers)
    assert abs(got["log_probs"] / sent - 1) < 1e-9, (got, sent)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[2048, 8192], help=f"multiples of {NUM_ANSWERS}")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a response")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks, each with a shard of its own")
    parser.add_argument("--max-memory", type=float, default=3.0, help="payloads that the largest size may take")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        serve(options.tokens)
        return 0
    if any(count <= 0 or count % NUM_ANSWERS for count in options.samples):
        parser.error(f"--samples {options.samples}: give multiples of {NUM_ANSWERS}")
    command = [sys.executable, __file__, "--serve", "--tokens", str(options.tokens)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
    ):
        make = [sys.executable, str(ROOT / "tools" / "make_quickstart.py"), "--out", folder]
        subprocess.run(make, check=True, capture_output=True)
        assert server.stdout is not None and server.stdin is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        start_ray("cpu", options.ranks, address=None, dashboard=False)
        try:
            print("| " + " | ".join(COLUMNS) + " |")
            print("|" + "---|" * len(COLUMNS))
            figures = []
            for count in sorted(options.samples):
                figures.append(measure(count, options.tokens, options.ranks, Path(folder) / "model", url))
                print(figures[-1].row(), flush=True)
        finally:
            ray.shutdown()
            server.stdin.close()
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n", encoding="utf-8")
    return judge(figures, options.max_memory)


def judge(figures: Sequence[Figures], max_memory: float) -> int:
    """1 if a figure is over its bound, which is printed."""
    first, last = figures[0], figures[-1]
    failures = []
    if last.peak_bytes > max_memory * last.payload_bytes:
        failures.append(f"{last.num_samples} samples took over {max_memory:g} payloads of memory")
    if last.seconds > GROWTH * first.seconds * last.num_samples / first.num_samples:
        failures.append(f"{last.num_samples} samples took over {GROWTH:g} times their share of time")
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
