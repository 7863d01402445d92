"""Cost of a rollout of long answers to the Buffer: `python -m tests.buffer.test_rollout_cost MODEL FOLDER`.

As a program it prints a JSON line a rollout: bytes of the shards, bytes by which the process grew at most, CPU seconds
of the process and of the helpers that it started and ended.
"""

import asyncio
import copy
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from aiohttp import web

from fusionrl.buffer.actor import BufferActor
from fusionrl.buffer.collect import EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.engines.answers import parse_answer
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import make_plan
from tests.engines.long_answers import VOCAB_SIZE, make_answer

SIZES, NUM_TOKENS, GROUP = (64, 256), 4096, 8


def serve() -> None:
    """Print the port of a server that answers `/generate` at once; answer until standard input ends."""
    turns = itertools.cycle([make_answer(number, NUM_TOKENS)[2] for number in range(64)])

    async def generate(request: web.Request) -> web.Response:
        ids = orjson.loads(await request.read())["input_ids"]
        bodies = [next(turns) for _ in (ids if isinstance(ids[0], list) else [ids])]
        body = b"[" + b",".join(bodies) + b"]" if isinstance(ids[0], list) else bodies[0]
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


@contextmanager
def served() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.buffer.test_rollout_cost"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.stdin.close()


def score(args: Any, sample: Any, *, rollout_id: int, evaluation: bool) -> None:
    """A hook: rewards that cost nothing."""
    sample.reward = float(sample.index % 2)


def make_buffer(url: str, model: Path, folder: Path, num_samples: int) -> BufferActor:
    num_prompts = num_samples // GROUP
    data = folder / f"{num_samples}.jsonl"
    data.write_text("".join(json.dumps({"input": f"{i}="}) + "\n" for i in range(num_prompts)))
    values = {"hf_checkpoint": str(model), "prompt_data": str(data), "num_rollout": 1, "actor_num_gpus_per_node": 1}
    values |= {"rollout_sample_hook_path": [f"{__file__}:score"], "rm_type": "random"}  # which is never asked
    values |= {"rollout_batch_size": num_prompts, "n_samples_per_prompt": GROUP, "sglang_server_concurrency": 8}
    values |= {"rollout_max_response_len": NUM_TOKENS, "max_tokens_per_gpu": 4 * NUM_TOKENS}
    config = Config.from_flat(values)
    shape = read_model_shape(model).model_copy(update={"vocab_size": VOCAB_SIZE})  # of the answers, which are checked
    plan = make_plan(config, shape, device="cpu", num_prompts=num_prompts)
    # The object store's part: it has a copy of its own.
    buffer = BufferActor(config, plan, str(folder / f"run-{num_samples}"), 1, put=copy.deepcopy)
    asyncio.run(buffer.setup(EngineEndpoints(url, (url,))))
    return buffer


def cost(buffer: BufferActor) -> dict[str, float]:
    before, bytes_before = os.times(), psutil.Process().memory_info().rss
    shards = asyncio.run(buffer.generate(0)).shards
    passed = [now - then for now, then in zip(os.times(), before, strict=True)]
    # The most so far: each rollout is larger than those before it.
    most = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    payload = sum(array.nbytes for shard in shards for array in shard.fields.values())
    return {"payload": payload, "grown": most - bytes_before, "cpu_s": sum(passed[:2]), "helpers_s": sum(passed[2:4])}


@pytest.mark.slow
@pytest.mark.timed
def test_samples_stay_arrays_and_are_parsed_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    with served() as url:
        measure = [sys.executable, "-m", "tests.buffer.test_rollout_cost", url, str(tiny_model), str(tmp_path)]
        printed = subprocess.run(measure, check=True, capture_output=True, text=True).stdout
    small, large = map(json.loads, printed.splitlines())
    assert large["payload"] > SIZES[1] * NUM_TOKENS * 16
    # Arrays and text, and what is under way: 3 payloads. A field as a list of Python's numbers adds 2.
    assert large["grown"] < 3.8 * large["payload"], large
    body, start = make_answer(0, NUM_TOKENS)[2], time.process_time()
    for _ in range(SIZES[1] - SIZES[0]):
        parse_answer(body)
    parsing = time.process_time() - start
    assert large["helpers_s"] - small["helpers_s"] > 0.4 * parsing, (small, large, parsing)
    # CPU seconds, not seconds: the machine may be busy. What grows with the square of the samples would be 16.
    assert large["cpu_s"] < 8 * small["cpu_s"], (small, large)


if __name__ == "__main__" and sys.argv[1:]:
    for size in SIZES:
        print(json.dumps(cost(make_buffer(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), size))), flush=True)
elif __name__ == "__main__":
    serve()
