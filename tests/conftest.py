"""What several rooms' tests share: a tiny model on disk, files of prompts, and the order for two workers."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from fusionrl.base.environment import extended_environment
from fusionrl.base.imports import without_collections
from tests.tiny_model import make_tiny_qwen3

if TYPE_CHECKING:
    from tests.warm_nursery import EngineBranch, SharedNursery

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Of whole runs (`tests/e2e/launch.py`), before a test has changed it: what a nursery imports depends on it."""
# How long an example takes is a matter of what else runs; what has a limit in seconds is marked `timed`.
hypothesis.settings.register_profile("fusionrl", deadline=None)
hypothesis.settings.load_profile("fusionrl")


# Files that take longest, the longest first: a worker that begins with one last keeps all others waiting.
_LONG = (
    *(
        "engines/test_engine.py",
        "weights/test_push_matrix.py",
        "sandbox/test_escapes.py",
        "weights/test_push_engine.py",
    ),
    *("rewards/test_code_cheats.py", "trainer/test_checkpoint.py", "tools/test_memory_check.py"),
    *("trainer/test_parity.py", "weights/test_push_processes.py", "tools/test_make_quickstart.py"),
    *("trainer/test_megatron_checkpoint.py", "trainer/test_losses.py", "trainer/test_parallel.py"),
    *("trainer/test_routing_replay.py", "trainer/test_train_hooks.py", "engines/test_answers.py"),
    *("tools/test_bench_loss.py", "runtime/test_gpus.py", "engines/test_scorers.py"),
    *("tools/test_from_slime_check.py", "data/test_auto_tokenizer.py", "pipeline/test_properties.py", "test_cli.py"),
)
# Files whose tests wait most of their time, the longest last: the third worker begins with these.
_WAITING = (
    *("tools/test_chaos.py", "rollout/test_time_limit.py", "runtime/test_watchdog.py", "runtime/test_guard.py"),
    *("sandbox/test_sandbox.py", "buffer/test_stream.py", "buffer/test_stream_batches.py"),
)
_NUM_RUNNERS = 2  # workers that begin with the whole runs


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect tests as a run imports libraries: the collector of garbage never looks at what is there to the end."""
    with without_collections():
        _rewrite_share(session.config)
        return (yield)


def _rewrite_share(config: pytest.Config) -> None:
    """Write the rewritten assertions of a worker's share of the files, so that each file is rewritten once.

    In a fresh clone all workers would rewrite all files, as they collect at once: 10 s of a core each.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    from _pytest.assertion import rewrite

    state, number = config.stash[rewrite.assertstate_key], int(worker["workerid"].removeprefix("gw"))
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number :: worker["workercount"]]:
        folder = rewrite.get_cache_dir(path)
        file = folder / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite.try_makedirs(folder) and rewrite._read_pyc(path, file) is None:
            status, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, status, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with whole runs, those that wait for each other first, then with the longest files.

    The end are files that wait. Within a file, and among the others, the order stays: the short ones in between keep
    all workers busy to the end.
    """
    here = Path(__file__).parent
    ranks = {here / name: rank for rank, name in enumerate(_LONG)}
    ranks |= {here / name: len(_LONG) + 1 + rank for rank, name in enumerate(_WAITING)}

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        is_grouped = item.get_closest_marker("xdist_group") is not None
        return item.get_closest_marker("e2e") is None, not is_grouped, ranks.get(item.path, len(_LONG))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, a worker gets a file at a time, as its tests share engines and ranks, and a whole run.

    Two cores are busy with two whole runs at a time. What such runs leave of them is for a third worker: it begins at
    the other end, with files that wait.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class RunsAndFiles(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)  # its group, or the test alone
            return scope if scope != nodeid or nodeid.startswith("tests/e2e/") else nodeid.split("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            if self.nodes.index(node) >= _NUM_RUNNERS:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return RunsAndFiles(config, log)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Stop where a test file imports Megatron-core as it is collected: the CPU layer has to be there before it."""
    if "megatron.core" not in sys.modules:
        return
    from fusionrl.base import cpu_wing
    from fusionrl.cpu import megatron_patches

    if cpu_wing.lacks_cuda() and not megatron_patches.is_installed():
        pytest.exit(f"{report.nodeid} imports megatron.core; import it after megatron_patches.install()", 4)


@pytest.fixture(autouse=True)
def usual_umask() -> None:
    """A command that an earlier test ran in this process may have let files be its user's alone."""
    os.umask(0o022)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with tokenizer and chat template; read-only."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def warm_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedNursery]:
    """Of whole runs' processes: their imports are made once a session."""
    from tests.warm_nursery import SharedNursery

    base = tmp_path_factory.getbasetemp()
    nursery = SharedNursery(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base, _ENVIRONMENT)
    yield nursery
    nursery.close()


@pytest.fixture
def warm(warm_nursery: SharedNursery) -> Iterator[None]:
    """Runs that a test starts begin with forks of that nursery."""
    with warm_nursery.applied():
        yield


@pytest.fixture(scope="session")
def engine_branch(warm_nursery: SharedNursery) -> Iterator[EngineBranch]:
    """Of SGLang servers, which are forks then, as in a run."""
    from tests.warm_nursery import EngineBranch

    branch = EngineBranch(warm_nursery)
    yield branch
    branch.close()


@pytest.fixture(scope="module")
def forked_engines(engine_branch: EngineBranch) -> Iterator[None]:
    """Within a file that uses it, servers are started as forks."""
    with extended_environment(engine_branch.variables):
        yield


@pytest.fixture(scope="session")
def forkserver() -> None:
    """The process that ranks are forks of, with all that any test's ranks import, whichever file comes first."""
    from multiprocessing import forkserver as server

    server.set_forkserver_preload(["tests.trainer.rank_imports", "tools.bench.push_processes"])
    server.ensure_running()


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
