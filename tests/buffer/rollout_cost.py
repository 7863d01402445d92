"""Rollouts of a Buffer in a process of its own, and what they cost it: `python rollout_cost.py URL MODEL FOLDER`.

Prints a JSON line a rollout: bytes of the shards, bytes by which the process grew at most, CPU seconds of the process
and of the helpers that it started and ended.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from fusionrl.buffer.actor import BufferActor, EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import make_plan
from tests.buffer.answer_server import VOCAB_SIZE

SIZES = (64, 256)
NUM_TOKENS = 4096
GROUP = 8


def score(args: Any, sample: Any, *, rollout_id: int, evaluation: bool) -> None:
    """A hook: rewards that cost nothing."""
    sample.reward = float(sample.index % 2)


def make_buffer(url: str, model: Path, folder: Path, num_samples: int) -> BufferActor:
    data = folder / f"{num_samples}.jsonl"
    data.write_text("".join(json.dumps({"input": f"{i}="}) + "\n" for i in range(num_samples // GROUP)))
    values = {
        "hf_checkpoint": str(model),
        "prompt_data": str(data),
        "rollout_sample_hook_path": [f"{__file__}:score"],
        "rm_type": "random",  # never asked
        "rollout_batch_size": num_samples // GROUP,
        "n_samples_per_prompt": GROUP,
        "rollout_max_response_len": NUM_TOKENS,
        "max_tokens_per_gpu": 4 * NUM_TOKENS,
        "sglang_server_concurrency": 8,
        "num_rollout": 1,
        "actor_num_gpus_per_node": 1,
    }
    config = Config.from_flat(values)
    shape = read_model_shape(model).model_copy(update={"vocab_size": VOCAB_SIZE})  # of the answers, which are checked
    plan = make_plan(config, shape, device="cpu", num_prompts=num_samples // GROUP)
    run_dir = str(folder / f"run-{num_samples}")
    # The object store's part: it has a copy of its own.
    buffer = BufferActor(config, plan, run_dir, 1, put=copy.deepcopy)
    asyncio.run(buffer.setup(EngineEndpoints(url, (url,))))
    return buffer


def cost(buffer: BufferActor) -> dict[str, Any]:
    """What one rollout took."""
    own, helpers, grown = os.times(), os.times(), psutil.Process().memory_info().rss
    shards = asyncio.run(buffer.generate(0)).shards
    own, helpers = _since(own, "user", "system"), _since(helpers, "children_user", "children_system")
    # The largest so far: each rollout is larger than those before it. Not ru_maxrss, which begins with the size of the
    # process that started this one.
    status = Path("/proc/self/status").read_text()
    grown = int(status.split("VmHWM:")[1].split()[0]) * 1024 - grown
    payload = sum(array.nbytes for shard in shards for array in shard.fields.values())
    return {"payload": payload, "grown": grown, "cpu_s": own, "helpers_cpu_s": helpers}


def _since(before: os.times_result, *names: str) -> float:
    now = os.times()
    return sum(getattr(now, name) - getattr(before, name) for name in names)


if __name__ == "__main__":
    for size in SIZES:
        print(json.dumps(cost(make_buffer(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), size))), flush=True)
