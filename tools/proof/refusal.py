"""A group for a weight push with an engine that first refuses to join: the trainer notices at once and continues.

    python -m tools.proof.refusal [--device cuda] [--json FILE]

Both sides are processes that join as a trainer and as SGLang do: by NCCL on the GPUs 0 and 1, or by gloo on a CPU. A
refusal must end the making of the group in seconds, and not at a time limit. The group that is made next is connected
before the first broadcast, which then brings every byte.
"""

import argparse
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from fusionrl.base.group_stores import join_group_store
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.weights.broadcast import Broadcast, init_external_group
from fusionrl.weights.remote_calls import stamp_of
from tools.threaded import Threaded

HOST, LIMIT_S, SECONDS = "127.0.0.1", 60.0, 20.0
NUM_BYTES = 64 * 2**20


def serve(pipe: Connection, device: str) -> None:
    """Be an engine's rank: join the requested groups, and add up the received bytes."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    group = None
    while True:
        command, values = pipe.recv()
        if command == "end":
            return
        try:
            if command == "join":
                sizes = (values["world_size"], values["rank_offset"], values["group_name"])
                store = join_group_store(values["master_address"], values["master_port"], LIMIT_S)
                group = init_external_group(values["backend"], store, *sizes, LIMIT_S)
                pipe.send(None)
            else:
                flat = torch.zeros(values, dtype=torch.uint8, device=device)
                dist.broadcast(flat, src=0, group=group)
                pipe.send(int(flat.long().sum()))
        except RuntimeError as error:
            pipe.send(error)


class Engine:
    """The engine's handle, in the trainer's process. `refuses` is how often it does."""

    def __init__(self, pipe: Connection, refuses: int) -> None:
        self.pipe, self.refuses, self.sums = pipe, refuses, list[object]()

    def init_weights_update_group(self, **values: object) -> None:
        """Join, or refuse."""
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("no group today")
        self._ask("join", values)

    def update_weights_from_distributed(self, *, shapes: list[list[int]], **_: object) -> None:
        """Take part in a broadcast."""
        self.sums.append(self._ask("receive", shapes[0][0]))

    def _ask(self, command: str, values: object) -> object:
        self.pipe.send((command, values))
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def show(device: str) -> dict[str, float]:
    """Do it, and return the seconds that it took.

    Raises:
        RuntimeError: it did not go as it must.
    """
    backend, ours, theirs = ("nccl", "cuda:0", "cuda:1") if device == "cuda" else ("gloo", "cpu", "cpu")
    pipe, child = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(child, theirs), daemon=True)
    process.start()
    try:
        our_device = torch.device(ours)
        if our_device.type == "cuda":
            torch.cuda.set_device(our_device)
        engine = Engine(pipe, refuses=1)
        broadcast, targets = (
            Broadcast(backend, HOST, LIMIT_S, our_device),
            [EngineTarget(0, Threaded(engine), "", (0,))],
        )
        start = time.perf_counter()
        try:
            broadcast.connect(targets)
        except RuntimeError as error:
            refused_s = time.perf_counter() - start
            if "no group today" not in str(error):
                raise
        else:
            raise RuntimeError("the engine refused, and the sender did not notice")
        start = time.perf_counter()
        broadcast.connect(targets)
        connected_s = time.perf_counter() - start
        flat = (torch.arange(NUM_BYTES, device=our_device) % 251).to(torch.uint8)
        start = time.perf_counter()
        broadcast.send([("w", flat)], flat, stamp_of(1), LIMIT_S)
        sent_s = time.perf_counter() - start
        if engine.sums != [int(flat.long().sum())]:
            raise RuntimeError("other bytes came than were sent")
        if refused_s > SECONDS:
            raise RuntimeError(f"the refusal was noticed after {refused_s:.0f} s")
        pipe.send(("end", None))
        return {"refusal s": refused_s, "connect s": connected_s, "first broadcast s": sent_s}
    finally:
        process.join(2)
        process.kill()


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    figures = show(options.device)
    print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
