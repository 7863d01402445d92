"""tools/bench/step.py: its step asks the actors as the driver does; the bare rows, the engine alone, the report."""

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from fusionrl.runtime.buffer_handle import BufferHandle
from tools.bench import engine_alone
from tools.bench.bare import Bare, samples_of
from tools.bench.step import COMPARED, GENERATE, PUSH, TRAIN, Turn, our_step, report


def test_a_step_of_the_loop() -> None:
    """The handle's calls have the handle's own signatures; whole, the program runs in `gpu_proof.py --rehearse`."""
    buffer = create_autospec(BufferHandle, instance=True)
    buffer.wait_rollout.return_value = SimpleNamespace(metrics={"perf/time_rollout_s": 1.0}, shards=["shard"])
    trained, pushed = [], []
    actors = SimpleNamespace(
        buffer=buffer,
        trainers=SimpleNamespace(train=lambda number, shards: trained.append((number, shards)) or {}),
        weights=SimpleNamespace(version=7, push=lambda number: pushed.append(number) or {"perf/time_sync_s": 2.0}),
    )
    values = our_step(actors, 3)  # type: ignore[arg-type]
    buffer.start_rollout.assert_called_once_with(3, 7)
    assert (trained, pushed) == ([(3, ["shard"])], [4]) and values["seconds"] > 0


def test_the_bare_rows_are_timed_at_every_turn(tiny_model: Path) -> None:
    with closing(Bare(str(tiny_model), samples_of(1, 2), 3, "fp32", 1)) as bare:
        for turn in (bare.seconds(), bare.seconds()):
            assert set(turn) == COMPARED.keys() - {"engine_alone"}
            assert 0 < min(turn.values()) <= max(turn.values()) < 60


def test_ratios_are_of_the_same_turn() -> None:
    def turn(generate: float, train: float, slowness: float) -> Turn:
        ours = {GENERATE: generate, TRAIN: train, PUSH: 0.1, "seconds": generate + train + 0.1}
        rows = dict.fromkeys(COMPARED, slowness)
        return Turn([ours, ours], trl=[4 * slowness, 4 * slowness], rows=rows)

    options = argparse.Namespace(model="m", prompts=4, samples=8, new_tokens=32, precision="fp32", threads=2)
    found = report(options, [turn(0.9, 0.8, 1.0), turn(9.0, 8.0, 10.0), turn(1.2, 1.0, 1.0)])
    json.dumps(found)
    assert found["fusionrl_parts"] == {"generate": 1.2, "train": 1.0, "sync": 0.1}
    assert found["fusionrl_over_bare"] == {name: {GENERATE: 0.9, TRAIN: 0.8}[part] for name, part in COMPARED.items()}
    assert found["bare_seconds"]["forward_backward"] == 1.0
    assert found["trl_over_fusionrl"] == round(4 / 1.8, 3)


class _Engine(BaseHTTPRequestHandler):
    """Answers a request when all of them have come, so a sender that waits for one answer before the next hangs."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        self.server.seen.append((self.path, self.headers["Authorization"]))
        if self.path == "/generate":
            self.server.together.wait(10)
        tokens = asked.get("sampling_params", {}).get("max_new_tokens", 0)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"output_ids": [1] * min(tokens, 5)}).encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def engine() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        server.together, server.seen, server.url = threading.Barrier(3), [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_engine_alone_gets_all_requests_at_once(engine: Any) -> None:
    assert 0 < engine_alone.seconds(engine.url, "key", [[1, 2]] * 3, 5) < 10
    assert engine.seen == [("/flush_cache", "Bearer key")] + [("/generate", "Bearer key")] * 3
    with pytest.raises(SystemExit, match="answered"):  # answers of another length are no measurement
        engine_alone.seconds(engine.url, None, [[1]] * 3, 6)
