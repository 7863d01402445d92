"""A run's folder with a timeline in which every time is known: two steps of ten seconds, on one machine or on two."""

import json
from pathlib import Path
from typing import Any

S = 1_000_000  # µs
WALL_NS = 1_760_000_000_000_000_000
MONO_NS = 5_000_000_000_000
BOOT = "boot-1"


class Process:
    """The file of one process; times are seconds since the driver began."""

    def __init__(self, run: Path, name: str, began: float = 0.0, *, boot: str = BOOT, ahead_s: float = 0.0) -> None:
        """`ahead_s`: by which the clock of its machine is ahead of the driver's."""
        self._path, self._began = run / "timeline" / f"{name}.a1.jsonl", began
        self._path.parent.mkdir(parents=True, exist_ok=True)
        clocks = {"mono_ns": MONO_NS + int((began + ahead_s) * 1e9), "wall_ns": WALL_NS + int(began * 1e9)}
        header = {"process": name, "attempt": 1, "pid": 7, "host": f"host of {boot}", "boot": boot}
        self.write(header | clocks | {"utc_offset_s": 0})

    def write(self, record: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def micros(self, time: float) -> int:
        return round((time - self._began) * S)

    def span(self, name: str, start: float, end: float, lane: str = "", **facts: Any) -> None:
        self.write(["X", lane, name, self.micros(start), self.micros(end) - self.micros(start), facts])

    def begin(self, name: str, start: float, lane: str = "", **facts: Any) -> None:
        self.write(["B", lane, name, self.micros(start), facts])

    def sample(self, index: int, parts: list[tuple[str, float, float, dict[str, Any]]], **facts: Any) -> None:
        start, end = parts[0][1], max(part[2] for part in parts)
        inner = [[n, self.micros(a), self.micros(b) - self.micros(a), more] for n, a, b, more in parts]
        told = {"index": index, "group": index // 2, "evaluation": 0, "status": "completed", "tokens": 10} | facts
        self.write(["S", self.micros(start), self.micros(end) - self.micros(start), told, inner])


def make_run(run: Path, *, far_s: float | None = None) -> Path:
    """Start to 5 s; steps at 5 … 15 s and 15 … 25 s, each 6 s of generation (a sample of 5.5 s, others of 2 s), 3 s of
    training, 0.8 s of a push, 0.2 s of nothing; a second to end.

    far_s  the second trainer is on another machine, whose clock is ahead by so much, as the driver has measured
    """
    driver = Process(run, "driver")
    driver.span("start", 0, 5)
    buffer = Process(run, "buffer", 2)
    trainers = [Process(run, "trainer-0", 2), Process(run, "trainer-1", 2)]
    if far_s is not None:
        (run / "timeline" / "trainer-1.a1.jsonl").unlink()
        trainers[1] = Process(run, "trainer-1", 2, boot="boot-2", ahead_s=far_s)
        driver.write(["K", "boot-2", driver.micros(5), int(far_s * 1e9), 400_000])
    engine = Process(run, "engine-actor-0", 1)
    folder = run / "rollouts"
    folder.mkdir()
    for step, at in ((1, 5.0), (2, 15.0)):
        driver.begin("step", at, step=step)
        driver.span("generate", at, at + 6, step=step)
        driver.span("train", at + 6, at + 9, step=step)
        driver.span("push", at + 9, at + 9.8, version=step)
        driver.span("step", at, at + 10, step=step)
        buffer.span("rollout", at, at + 5.9, "rollouts", step=step)
        buffer.span("collect", at, at + 5.7, "stages", step=step)
        buffer.span("cut", at + 5.8, at + 5.9, "stages", step=step)
        rows = []
        for number in range(20):
            index, took = 20 * step + number, 5.5 if number == 7 else 2.0
            engine_s = {"engine_s": took - 0.2, "queue_s": 0.2, "first_token_s": 0.5} if number == 7 else {}
            turn = {"version": step - 1, "tokens": 10} | engine_s
            waited, end = ("wait", at, at + 0.1, {}), at + took
            buffer.sample(index, [waited, ("turn", at + 0.1, end, turn), ("reward", end, end + 0.1, {})])
            rows.append(json.dumps({"group_index": index // 2, "index": index, "prompt": '"index":9'}))
        (folder / f"step_{step:06d}.train.a1.jsonl").write_text("\n".join(rows) + "\n")
        for rank, trainer in enumerate(trainers):
            work = 2.4 if rank else 1.2
            trainer.span("train", at + 6.1, at + 8.9, step=step)
            trainer.span("forward", at + 6.2, at + 6.2 + work / 3, "megatron", micro_batch=0)
            trainer.span("backward", at + 6.2 + work / 3, at + 6.2 + work, "megatron", micro_batch=0)
            trainer.span("push", at + 9.1, at + 9.7, version=step)
            trainer.span("gather", at + 9.1, at + 9.2, bucket=0)
            trainer.span("send", at + 9.2, at + 9.6, "send", bucket=0, bytes=1000)
        engine.span("pause", at + 9.1, at + 9.15, "Dummy-3")
        engine.span("load weights", at + 9.2, at + 9.6, "Dummy-4")
        engine.span("resume", at + 9.65, at + 9.7, "Dummy-3")
    driver.span("end", 25, 26)
    return run
