"""A warm nursery (`tests/warm_start.py`) that all workers of a session of tests share.

Whole runs begin with forks of it. Servers that a test starts by itself are forks as those of a run are. A start costs
a second or two of a core and not ten. A process whose environment is another is started in the usual way. By that
of runs and of the nursery SGLang imports the models of all architectures of these tests.
"""

import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from fusionrl.base.environment import extended_environment
from fusionrl.base.nursery import Order
from fusionrl.base.nursery_client import FOLDER_VARIABLE
from fusionrl.base.process import ROOM
from fusionrl.config.config import Config
from fusionrl.runtime.early_start import EARLY_LINE, engine_branch, start_nursery
from tests.warm_start import ROOM_VARIABLE, WARM_VARIABLE, WarmBranches, driver_branch, warm_order

# Of `make_tiny_qwen3`, of models with experts, and of `make_classifier`; then of families whose engines tests start.
ARCHITECTURES = [
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3ForSequenceClassification"),
    *("LlamaForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "GptOssForCausalLM"),
    *("Gemma3ForCausalLM", "Olmo2ForCausalLM", "MiniMaxM2ForCausalLM"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "KimiVLForConditionalGeneration"),
]
OTHER_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"


def model_in(home: Path) -> str:
    """Return a folder with the configuration of the tests' models; a nursery reads no more of them."""
    (home / "config.json").write_text(json.dumps({"architectures": ARCHITECTURES}))
    return str(home)


# tests/e2e/hooks.py reads these.
_OF_HOOKS = ("FUSIONRL_TEST_FILE", "FUSIONRL_TEST_SAMPLE", "FUSIONRL_TEST_FAILS_AT", "FUSIONRL_TEST_WAIT_S")
_FREE = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "TERM", "NO_COLOR", "FUSIONRL_ENGINE_KEY", *_OF_HOOKS)


class SharedNursery:
    """One worker's view of it. `folder`: of all workers of this session.

    Whoever finds none starts one, and ends it when its own tests are over; so the next to ask may start another.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """`environment`: of runs."""
        self.environment = environment
        self._found, self._lock = folder / "nursery.json", folder / "nursery.lock"
        self._own: list[tuple[subprocess.Popen[bytes], Path]] = []

    def variables(self) -> dict[str, str]:
        """Return those with which a run's branches are forks of a nursery that lives."""
        with open(self._lock, "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._lives():
                self._start()
            return json.loads(self._found.read_text())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give this process the environment of runs that begin with forks of it.

        That is the one that this process began with: libraries that it has imported have added to its own.
        """
        variables = self.variables()
        names = [name for name in os.environ if name not in self.environment and not name.startswith("PYTEST_")]
        added = {name: os.environ.pop(name) for name in names}
        try:
            with extended_environment(variables):
                yield
        finally:
            os.environ.update(added)

    def close(self) -> None:
        """End what this worker has started."""
        for nursery, home in self._own:
            nursery.kill()
            nursery.wait()
            assert nursery.stdin is not None
            nursery.stdin.close()
            shutil.rmtree(home, ignore_errors=True)

    def _lives(self) -> bool:
        if not self._found.exists():
            return False
        folder = json.loads(self._found.read_text())[WARM_VARIABLE]
        sockets = [str(path) for path in Path(folder).glob("*") if path.is_socket()]
        return bool(sockets) and all(_listens(path) for path in sockets)

    def _start(self) -> None:
        home = Path(tempfile.mkdtemp(prefix="nursery-"))  # a short path: a socket's has 107 characters
        key = secrets.token_hex(32)
        (home / "key").write_text(key)
        config = Config.from_flat({"mode": "rl", "hf_checkpoint": model_in(home)})
        with patch.dict(os.environ, self.environment, clear=True):
            others = engine_branch(model_in(home), home).environment[OTHER_MODELS]
        environment = {**self.environment, OTHER_MODELS: others}
        environment |= {ROOM_VARIABLE: " " * ROOM}  # branches get only what it lacks
        with patch.dict(os.environ, environment, clear=True):
            order = warm_order(config, home, key, _FREE)
            order = replace(order, branches=[*order.branches, driver_branch(home, _FREE)])
            nursery = start_nursery(home, EARLY_LINE + order.to_line())
        self._own.append((nursery, home))
        while not all(_listens(branch.path) for branch in order.branches) and nursery.poll() is None:
            time.sleep(0.01)
        new = self._found.with_suffix(".new")
        new.write_text(json.dumps({WARM_VARIABLE: str(home), OTHER_MODELS: others}))
        new.replace(self._found)


class EngineBranch:
    """A branch for the servers that one worker's tests start by themselves."""

    def __init__(self, nursery: SharedNursery, key: str | None = None) -> None:
        """`key`: of a Ray cluster whose actors start servers."""
        self._home = Path(tempfile.mkdtemp(prefix="engines-"))
        key = key or secrets.token_hex(32)
        variables = nursery.variables()
        with patch.dict(os.environ, {**nursery.environment, **variables}, clear=True):
            order = Order(key, [engine_branch(model_in(self._home), self._home)])
            self._branches = WarmBranches(order, self._home / "nursery.log")
        self.variables = {FOLDER_VARIABLE: str(self._home), "RAY_AUTH_TOKEN": key}
        self.variables[OTHER_MODELS] = variables[OTHER_MODELS]

    def close(self) -> None:
        """End it."""
        self._branches.close()
        shutil.rmtree(self._home, ignore_errors=True)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
        except OSError:  # refused, or not there
            return False
    return True
