"""What several rooms' tests share: a tiny model on disk, files of prompts, and the order for two workers."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.tiny_model import make_tiny_qwen3

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# How long an example takes is a matter of what else runs; what has a limit in seconds is marked `timed`.
hypothesis.settings.register_profile("fusionrl", deadline=None)
hypothesis.settings.load_profile("fusionrl")


# Files that take longest, the longest first: a worker that begins with one last keeps all others waiting.
_LONG = (
    "sandbox/test_sandbox.py",
    "engines/test_engine.py",
    "cluster/test_supervisor.py",
    "trainer/test_checkpoint.py",
    "tools/test_memory_check.py",
    "cluster/test_recovery.py",
    "trainer/test_parity.py",
    "sync/test_push_processes.py",
    "tools/test_make_quickstart.py",
    "trainer/test_megatron_checkpoint.py",
    "trainer/test_losses.py",
    "sandbox/test_escapes.py",
    "trainer/test_parallel.py",
    "trainer/test_routing_replay.py",
    "trainer/test_train_hooks.py",
    "engines/test_answers.py",
    "tools/test_bench_loss.py",
    "cluster/test_open_ray.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with whole runs, those that wait for each other first, then with the longest files.

    Within a file, and among the others, the order stays: the short ones at the end keep two workers busy to the end.
    """
    here = Path(__file__).parent
    ranks = {here / name: rank for rank, name in enumerate(_LONG)}

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        is_grouped = item.get_closest_marker("xdist_group") is not None
        return item.get_closest_marker("e2e") is None, not is_grouped, ranks.get(item.path, len(ranks))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, a worker gets a file at a time, as its tests share engines and ranks, and a whole run."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class RunsAndFiles(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)  # its group, or the test alone
            return scope if scope != nodeid or nodeid.startswith("tests/e2e/") else nodeid.split("::")[0]

    return RunsAndFiles(config, log)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Stop where a test file imports Megatron-core as it is collected: the CPU layer has to be there before it."""
    if "megatron.core" not in sys.modules:
        return
    from fusionrl.upstream import cpu_megatron

    if cpu_megatron.is_needed() and not cpu_megatron.is_installed():
        pytest.exit(f"{report.nodeid} imports megatron.core; import it in the test, after cpu_megatron.install()", 4)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with tokenizer and chat template; read-only."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    """The tiny model's tokenizer: a byte a token. Shared: do not write on it."""
    from fusionrl.data.tokenizer import load_tokenizer

    return load_tokenizer(str(tiny_model))


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """write_rows(rows, name="data.jsonl") -> path; a row that is a str is written as it stands."""

    def write(rows: list[Any], name: str = "data.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def json_server() -> Iterator[Any]:
    """An HTTP server that gives its `answers` (status, JSON value) in turn, and keeps what it was `asked`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.asked.append((body, self.headers.get("Authorization")))
            status, value = made.answers.pop(0) if made.answers else (200, {})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *args: Any) -> None: ...

    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.answers, made.asked, made.url = [], [], f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """hf(family, tied, **config) -> (folder, transformers model), made once a session."""
    from tests.trainer import hf_models

    made: dict[Any, tuple[Path, Any]] = {}

    def get(family: str, tied: bool, **values: Any) -> tuple[Path, Any]:
        key = (family, tied, repr(sorted(values.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (folder, hf_models.make(folder, family, tied, **values))
        return made[key]

    return get
