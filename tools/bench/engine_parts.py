"""The time of an engine on a CPU by part: scheduler, model, attention, sampling, answers.

    python tools/bench/engine_parts.py --model runs/smollm2-135m/model [--requests 32 --new-tokens 32 --rounds 5]

Requests go straight to the engine (`engine_alone.py`). In its scheduler's process a clock stands around the functions
that `PARTS` names; a part's time is without that of the parts within it. Printed are, of a round, the median
milliseconds of each part and its share of the round, and the CPU seconds of the engine's processes. What is left of a
round is HTTP, tokenizer, detokenizer and the messages between the processes, as far as the scheduler waits for them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from fusionrl.engines.engine import EngineActor

P = ParamSpec("P")
T = TypeVar("T")

PARTS = (
    ("take requests", "sglang.srt.managers.scheduler", "Scheduler.ingest_requests"),
    ("choose the batch", "sglang.srt.managers.scheduler", "Scheduler.get_next_batch_to_run"),
    ("prepare the batch", "sglang.srt.managers.scheduler", "Scheduler.run_batch"),
    ("model", "sglang.srt.model_executor.model_runner", "ModelRunner.forward"),
    ("output layer", "sglang.srt.layers.logits_processor", "LogitsProcessor.forward"),
    ("attention of prompts", "fusionrl.cpu.attention_backend", "BatchedAttentionBackend._forward"),
    ("attention of a step", "fusionrl.cpu.kernels", "attend_new"),
    ("sample", "sglang.srt.model_executor.model_runner", "ModelRunner.sample"),
    ("answers", "sglang.srt.managers.scheduler", "Scheduler.process_batch_result"),
)
IDLE = ("idle", "sglang.srt.managers.scheduler", "Scheduler.on_idle")


class Clock:
    """Adds up the time of each part, without that of the parts within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def around(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """`function`, with its time added to `part`."""

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed


def put_clock(file: Path) -> None:
    """Put a clock around the parts, in a process whose forks schedulers are; an idle one writes its seconds."""
    clock = Clock()

    def put(part: str, module: str, name: str, wrap: Callable[[str, Callable[..., object]], object]) -> None:
        owner, _, function = name.rpartition(".")
        found = importlib.import_module(module)
        found = getattr(found, owner) if owner else found
        setattr(found, function, wrap(part, getattr(found, function)))

    def writing(part: str, function: Callable[P, T]) -> Callable[P, T]:
        written = 0.0

        @functools.wraps(function)
        def idle(*args: P.args, **kwargs: P.kwargs) -> T:
            nonlocal written
            if clock.seconds["model"] != written:
                written = clock.seconds["model"]
                file.write_text(json.dumps(clock.seconds))
            return function(*args, **kwargs)

        return idle

    for part in PARTS:
        put(*part, clock.around)
    put(*IDLE, writing)


def serve(file: str, argv: list[str]) -> None:
    """Be the server, with the clock in its schedulers: `argv` is `python -m fusionrl.engines.launch_server ...`."""
    from fusionrl.engines import launch_server

    launch_server.import_server()
    put_clock(Path(file))
    launch_server.main(argv[argv.index("fusionrl.engines.launch_server") + 1 :])


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of the server and of its children, by their titles."""
    import psutil

    found: dict[str, float] = defaultdict(float)
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        name = (process.cmdline() or ["?"])[0].partition("::")[2] or "HTTP server, tokenizer"
        found[name] += sum(process.cpu_times()[:2])
    return found


def one_round(
    engine: EngineActor, file: Path, prompts: list[list[int]], new_tokens: int
) -> tuple[float, dict[str, float], dict[str, float]]:
    """(seconds, those of each part, CPU seconds of each process) of one request a prompt."""
    from tools.bench import engine_alone

    pid = int(str(engine.info()["pid"]))
    before, cpu_before = _read(file), cpu_seconds(pid)
    took = engine_alone.seconds(engine.url, None, prompts, new_tokens)
    time.sleep(1.0)  # until the scheduler is idle, and has written
    after, cpu = _read(file), cpu_seconds(pid)
    parts = {part: after[part] - before.get(part, 0.0) for part, *_ in PARTS if part in after}
    parts["else"] = took - sum(parts.values())
    return took, parts, {name: cpu[name] - cpu_before[name] for name in cpu}


def main() -> None:
    """Command line."""
    from fusionrl.data.tokenizer import load_tokenizer
    from tools.bench import decode
    from tools.bench.bare import DTYPES, samples_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--requests", type=int, default=32, help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="at most")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        wrapper = (sys.executable, str(Path(__file__).resolve()), "--serve", str(file))
        sizes = argparse.Namespace(**vars(options) | {"requests": [options.requests]}, server_arg=[], log_dir=None)
        engine = decode.start_engine(sizes, "torch_batched", 0, folder, wrapper)
        try:
            tokenizer = load_tokenizer(options.model)
            prompts = [tokenizer.encode(p, add_special_tokens=False) for p in samples_of(options.requests, 1)]
            rounds = [one_round(engine, file, prompts, options.new_tokens) for _ in range(options.rounds + 1)]
        finally:
            engine.shutdown()
    report(rounds[1:])


def _read(file: Path) -> dict[str, float]:
    return json.loads(file.read_text()) if file.exists() else {}


def report(rounds: list[tuple[float, dict[str, float], dict[str, float]]]) -> None:
    """Print the table."""
    print(f"round {1e3 * statistics.median(took for took, *_ in rounds):8.0f} ms")
    for part in rounds[0][1]:
        milliseconds = 1e3 * statistics.median(parts[part] for _, parts, _ in rounds)
        share = statistics.median(parts[part] / took for took, parts, _ in rounds)
        print(f"{part:20} {milliseconds:8.1f} ms {share:7.1%}")
    for name in rounds[0][2]:
        print(f"CPU of {name:30} {statistics.median(cpu[name] for *_, cpu in rounds):6.2f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3:])
    else:
        main()
