"""slime's Dataset and read_file, its hooks of samples, and its aborts of engines."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.data.sample import Sample


def test_the_prompts_of_a_file_are_samples_shuffled_for_each_epoch(
    tokenizer: Any, write_rows: Callable[..., Path]
) -> None:
    from slime.utils.data import Dataset, read_file  # type: ignore[import-not-found]

    rows = [{"text": "x" * n, "answer": str(n), "metadata": {"n": n}} for n in range(1, 9)]
    path = str(write_rows(rows))
    assert list(read_file(path)) == rows and len(list(read_file(f"{path}@[2:4]"))) == 2
    data = Dataset(path, tokenizer, None, 6, label_key="answer", seed=3)
    assert len(data) == 6 and [data[i].label for i in range(6)] == ["1", "2", "3", "4", "5", "6"]
    assert data[0].metadata == {"n": 1} and data[0].prompt == "x"
    data.shuffle(0)
    first = [sample.label for sample in data.samples]
    data.shuffle(0)
    assert [sample.label for sample in data.samples] == first and sorted(first) == ["1", "2", "3", "4", "5", "6"]
    data.shuffle(1)
    assert [sample.label for sample in data.samples] != first
    chat = Dataset(path, tokenizer, None, None, apply_chat_template=True)
    assert chat[0].prompt.startswith("<|im_start|>user\nx<|im_end|>")
    with pytest.raises(ValueError, match="images are not trained on yet"):
        Dataset(path, tokenizer, None, None, multimodal_keys={"image": "images"})


def test_the_hooks_of_samples_are_called_on_nested_lists(tmp_path: Path, tiny_model: Path) -> None:
    from slime.rollout.sample_hooks import apply_rollout_sample_hooks  # type: ignore[import-not-found]

    file = tmp_path / "hook.py"
    file.write_text("def note(args, sample, *, rollout_id, evaluation): sample.metadata['seen'] = evaluation\n")
    values: dict[str, Any] = {"hf_checkpoint": str(tiny_model), "rollout_sample_hook_path": [f"{file}:note"]}
    args: Namespace = Config.from_flat(values).to_args()
    samples = [[Sample(response="a", response_length=0)], Sample(response="b")]
    (inner,), outer = asyncio.run(apply_rollout_sample_hooks(args, samples, evaluation=True))
    assert inner.metadata == outer.metadata == {"seen": True}


def test_an_engine_is_aborted_until_it_has_no_request() -> None:
    from slime.backends.sglang_utils.server_control import (  # type: ignore[import-not-found]
        abort_servers_until_idle,
    )

    class Engine(BaseHTTPRequestHandler):
        aborts = 0

        def _say(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            Engine.aborts += self.path == "/abort_request"
            self._say({})

        def do_GET(self) -> None:
            self._say({"loads": [{"num_running_reqs": int(Engine.aborts < 3), "num_waiting_reqs": 0}]})

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        asyncio.run(abort_servers_until_idle([f"http://127.0.0.1:{server.server_port}"]))
    finally:
        server.shutdown()
        server.server_close()
    assert Engine.aborts == 3
