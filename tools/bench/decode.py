"""Generation on a CPU: engines with different attention backends, and a plain loop over transformers, by turns.

    python tools/bench/decode.py --model runs/smollm2-135m/model --requests 32 --prompt-tokens 8 --new-tokens 32
    python tools/bench/decode.py --model runs/quickstart/sft-model --requests 1 8 32 256 --new-tokens 5 --threads 1

All engines are up at once (one that has no request sleeps) and get the same requests, all at once, sampled with
log-probs and with the end token ignored. The loop has the same prompts as one batch: a forward pass of the prompts and
one a token over transformers' model with its dynamic cache, sampling, and the log-prob of each token. Printed are, for
each number of requests, the median tokens a second of each row and the median over the turns of its time over the
loop's; the order changes from turn to turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fusionrl.engines.client import GenerateClient
from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.models.shape import read_model_shape
from tools.bench.asked import Asked

LOOP = "loop"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
WORKER = """
import sys, time, torch
from transformers import AutoModelForCausalLM
from tools.bench.bare import plain_loop

path, dtype, threads = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
print("ready", flush=True)
for line in sys.stdin:
    num_requests, length, num_new = map(int, line.split())
    prompts = torch.randint(0, model.config.vocab_size, (num_requests, length))
    start = time.perf_counter()
    plain_loop(model, prompts, num_new)
    print(time.perf_counter() - start, flush=True)
"""


class Loop:
    """The plain loop, in a process of its own with the engines' number of threads."""

    def __init__(self, model: str, dtype: str, num_threads: int) -> None:
        self._asked = Asked([sys.executable, "-c", WORKER, model, dtype, str(num_threads)])

    def seconds(self, num_requests: int, prompt_tokens: int, new_tokens: int) -> float:
        """Time of one batch."""
        return float(self._asked.ask(f"{num_requests} {prompt_tokens} {new_tokens}"))

    def close(self) -> None:
        """End the process."""
        self._asked.close()


def start_engine(
    options: argparse.Namespace, name: str, index: int, folder: str, wrapper: tuple[str, ...] = ()
) -> EngineActor:
    """An engine whose attention backend is `name`, given back when it generates."""
    longest = options.prompt_tokens + options.new_tokens + 1
    arguments = {
        "attention_backend": name,
        "max_running_requests": max(options.requests),
        "max_total_tokens": max(4096, 2 * max(options.requests) * longest),
        **dict(argument.split("=", 1) for argument in options.server_arg),
    }
    spec = EngineSpec(
        index=index,
        model_path=options.model,
        device="cpu",
        dtype=DTYPES[options.precision],
        tp_size=1,
        gpu_ids=(0,),
        host="127.0.0.1",
        api_key=None,
        log_dir=options.log_dir or folder,
        seed=1,
        num_threads=options.threads,
        server_args=arguments,
        wrapper=wrapper,
    )
    engine = EngineActor(spec)
    engine.start()
    return engine


async def generate(engine: EngineActor, prompts: Sequence[Sequence[int]], num_new: int) -> float:
    """Seconds until the last answer has come."""
    sampling = {"temperature": 1.0, "max_new_tokens": num_new, "ignore_eos": True}
    async with GenerateClient(engine.url, None, 3600.0) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(client.generate({"input_ids": list(prompt), "sampling_params": sampling}) for prompt in prompts)
        )
        seconds = time.perf_counter() - start
    if any(len(answer.tokens) != num_new for answer in answers):
        raise SystemExit("an engine did not make all tokens: lower --new-tokens")
    return seconds


def turn(options: argparse.Namespace, rows: dict[str, EngineActor | Loop], count: int, number: int) -> dict[str, float]:
    """Seconds of each row for `count` requests, in another order each time."""
    names = list(rows)
    random = np.random.default_rng(number)
    seconds = {}
    for name in names[number % len(names) :] + names[: number % len(names)]:
        row = rows[name]
        if isinstance(row, Loop):
            seconds[name] = row.seconds(count, options.prompt_tokens, options.new_tokens)
        else:
            prompts = random.integers(0, options.vocab_size, (count, options.prompt_tokens)).tolist()
            seconds[name] = asyncio.run(generate(row, prompts, options.new_tokens))
    return seconds


def report(options: argparse.Namespace, count: int, turns: Sequence[dict[str, float]]) -> None:
    """Print one line a row."""
    base = LOOP if LOOP in turns[0] else next(iter(turns[0]))
    for name in turns[0]:
        rate = statistics.median(count * options.new_tokens / one[name] for one in turns)
        ratio = statistics.median(one[name] / one[base] for one in turns)
        print(f"{count:8} {name:16} {rate:10.1f} {ratio:10.3f}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--backends", nargs="+", default=["torch_batched", "torch_native"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 256], help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--server-arg", nargs="*", default=[], metavar="FIELD=VALUE", help="more of SGLang's fields")
    parser.add_argument("--log-dir", help="of the engines, kept")
    parser.add_argument("--no-loop", action="store_true", help="engines alone; ratios are to the first one")
    options = parser.parse_args()
    options.vocab_size = read_model_shape(options.model).vocab_size
    rows: dict[str, EngineActor | Loop] = {}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(options.backends):
            rows[name] = engine = start_engine(options, name, index, folder)
            stack.callback(engine.shutdown)
        if not options.no_loop:
            rows[LOOP] = loop = Loop(str(Path(options.model).resolve()), DTYPES[options.precision], options.threads)
            stack.callback(loop.close)
        print(
            f"{'requests':>8} {'':16} {'tokens/s':>10} {'time/' + (LOOP if LOOP in rows else options.backends[0]):>10}"
        )
        for count in options.requests:
            turn(options, rows, count, 0)  # warm-up
            report(options, count, [turn(options, rows, count, number + 1) for number in range(options.turns)])


if __name__ == "__main__":
    main()
