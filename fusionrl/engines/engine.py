"""One SGLang engine: its server as a child process, under the control endpoints of `EngineControl`.

Every method that talks to the server raises RuntimeError: with endpoint, status and the server's text if it refuses,
and with the end of its log if it is dead.
"""

import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fusionrl.base.sockets import socket_folder
from fusionrl.base.wording import BASE
from fusionrl.engines.control import CONTROL_TIMEOUT_S, EngineControl
from fusionrl.engines.http import EndpointError
from fusionrl.engines.process import ChildExited, ChildProcess, base_url, shared_memory_of, start_on_free_ports
from fusionrl.engines.spec import EngineSpec, server_command, server_environment
from fusionrl.models.engine_config import read_scorer, text_view
from fusionrl.models.hf_folder import stored_tensors
from fusionrl.observe.spans import phase

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

__all__ = ["EngineActor", "EngineSpec"]

_MAX_TMPDIR_BYTES = 60  # SGLang's sockets have names of up to 30 behind it
Files: TypeAlias = "Mapping[str, np.ndarray]"
"""Name → bytes of each file of a folder, uint8: an array, which processes of a node share."""
_ROOM_POLL_S = 0.2  # between two tries to load an adapter for which the server has no room yet
_HEADS_WITH_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


class EngineActor(EngineControl):
    """Starts, controls and ends one SGLang server."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__("", spec.tp_size, spec.api_key)
        self.spec = spec
        self._server: ChildProcess | None = None
        self._shared_memory: set[Path] = set()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    # ---- life

    def start(self) -> str:
        """Start the server, wait until it has generated a token, and return its base URL.

        Raises RuntimeError with the end of the log if it ends or is not ready after `spec.start_timeout_s` seconds.
        """
        if self._server is not None and self._server.alive():
            return self.url
        self._has_update_sessions, self._is_paused_in_place = None, False
        num_ports = 3 if self.spec.meets_decoders else 2
        self._server = start_on_free_ports([self.spec.host] * num_ports, self._spawn, self._wait_ready)
        if self.spec.role == "reward-model":
            self._clear_head_bias()
        self._shared_memory |= shared_memory_of(self._server.pid)
        return self.url

    def _spawn(self, ports: list[int]) -> ChildProcess:
        port, nccl_port, *bootstrap_ports = ports
        return self._spawn_server(port, nccl_port, None, *bootstrap_ports)

    def _spawn_server(
        self, port: int, nccl_port: int, meeting: str | None, bootstrap_port: int | None = None
    ) -> ChildProcess:
        # SGLang leaves a handful of sockets in the temporary folder.
        parent = socket_folder(_MAX_TMPDIR_BYTES, "the engine's sockets are")
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-", dir=parent, ignore_cleanup_errors=True)
        spec = self.spec
        if spec.images is None:
            folder, draft = spec.model_path, spec.server_args.get("speculative_draft_model_path")
            has_draft = draft is not None and Path(str(draft)).resolve() != Path(folder).resolve()
            view = text_view(folder, Path(self._scratch.name, "model"), is_filled=has_draft)
            spec = replace(spec, model_path=view)
        env = server_environment(spec)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
        env["TMPDIR"] = self._scratch.name
        self.url = base_url(self.spec.host, port)
        return ChildProcess(
            server_command(spec, port, nccl_port, meeting, bootstrap_port),
            os.path.join(self.spec.log_dir, self.spec.log_name),
            env=env,
            secret=self.spec.api_key,
        )

    def _wait_ready(self, server: ChildProcess) -> None:
        self._wait_for(server, "/health")
        self._wait_for(server, "/health_generate")  # a model that loads but cannot run fails here

    def _wait_for(self, server: ChildProcess, path: str) -> None:
        purpose = f"start of {self.spec.name} ({self.spec.model_path}) at {self.url}"
        server.wait_until(lambda: self._answers(path), self.spec.start_timeout_s, purpose)

    def _answers(self, path: str) -> bool:
        try:
            if path == "/health_generate" and self.spec.device == "cpu":
                # /health_generate sleeps a second before it looks for the token.
                payload = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
                payload |= {"lora_path": BASE} if self.spec.adapters else {}
                path = "/classify" if self.spec.role == "reward-model" else "/generate"
                super()._call("POST", path, payload, timeout_s=60.0)
            else:
                super()._call("GET", path, timeout_s=30.0)
        except RuntimeError:
            return False
        return True

    def _clear_head_bias(self) -> None:
        """Set the bias of a classifier's head to 0 where the checkpoint has none.

        SGLang (0.5.23) gives Qwen2's and Qwen3's head a bias that transformers' has not, and leaves it at
        random: every score would be off by the same number, another one after each start.
        """
        path, flag = self.spec.model_path, "--rm-model"
        model = read_scorer(path, flag)
        if model.architecture in _HEADS_WITH_BIAS and "score.bias" not in stored_tensors(path, flag):
            import torch

            from fusionrl.engines.weight_payload import by_value

            zeros = by_value([("score.bias", torch.zeros(model.num_labels))])
            self.begin_weight_update()
            payloads = [zeros] * self.spec.tp_size
            self.update_weights_from_tensor(payloads, load_format=None, version=None, flush_cache=True)
            self.end_weight_update()

    def check_alive(self) -> None:
        """Raise RuntimeError with the end of the server's log when its process is dead; asks the server nothing."""
        self._living("generation")

    def fault(self, timeout_s: float | None = None, *, makes_tokens: bool = True) -> str | None:
        """Return the server's fault in words, or None; Ray would log an exception of a call that is not awaited.

        A fault: its process is dead, or, with `timeout_s`, it makes no token within as many seconds (over 1: SGLang
        looks once a second). Any token will do, so a busy server generates no extra one. Not `makes_tokens`, as for a
        paused server: its scheduler does not answer within them, which takes it milliseconds.
        """
        try:
            self.check_alive()
            if timeout_s is not None:
                self._wait_for_answer(timeout_s, makes_tokens)
        except RuntimeError as error:
            return str(error)
        return None

    def _wait_for_answer(self, timeout_s: float, makes_tokens: bool) -> None:
        path, fault = ("/health_generate", "made no token") if makes_tokens else ("/server_info", "did not answer")
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._call("GET", path, timeout_s=max(0.1, deadline - time.monotonic()))
                return
            except ChildExited:
                raise
            except RuntimeError as error:  # a 503 after SGLang's own limit of 20 s does not count as an answer
                if time.monotonic() >= deadline or not makes_tokens:
                    raise RuntimeError(
                        f"engine {self.spec.index} at {self.url} {fault} within {timeout_s:g} s"
                        f" (--rollout-health-check-timeout): {error}"
                    ) from error
            time.sleep(0.2)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the server and all its processes, by force after `timeout_s` seconds. Idempotent.

        Without a limit: at once on a CPU. SGLang looks for SIGTERM once in 5 s, and then waits for its schedulers,
        which matters where they hold a GPU's memory.
        """
        if self._server is not None:
            if timeout_s is None:
                timeout_s = 0.0 if self.spec.device == "cpu" else 10.0
            self._server.terminate(timeout_s=timeout_s)
        # SGLang leaves its own segments behind, 25 MB of message queue for each engine with tp_size > 1.
        while self._shared_memory:
            self._shared_memory.pop().unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.cleanup()

    # ---- the host's copy of the weights

    def pull_weights(self, folder: str, local_folder: str | None) -> str | None:
        """Bring this host's copy to the version in `folder`; see `fusionrl.engines.local_copy.pull_version`."""
        from fusionrl.engines.local_copy import pull_version

        return pull_version(folder, local_folder)

    def drop_local_copy(self, local_folder: str) -> None:
        shutil.rmtree(local_folder, ignore_errors=True)

    # ---- adapters

    @phase("load adapters")
    def load_adapters(self, version: int, adapters: Mapping[str, Files], timeout_s: float) -> None:
        """Load adapters as `version`, while requests run; wait while those of older versions leave no room.

        adapters: name → the files of its PEFT folder.
        """
        from fusionrl.engines.adapter_versions import NO_ROOM

        deadline, is_told = time.monotonic() + timeout_s, False
        assert self._scratch is not None, "the server is started"
        for name, files in adapters.items():
            folder = os.path.join(self._scratch.name, f"{name}-{version}")
            try:
                self.write_files(folder, files)
                while True:
                    try:
                        self._post("/load_lora_adapter", {"lora_name": f"{name}@{version}", "lora_path": folder})
                        break
                    except EndpointError as error:
                        if NO_ROOM not in str(error) or time.monotonic() > deadline:
                            raise
                        if not is_told:
                            logger.warning("a push of version %d waits in %s: %s", version, self.spec.name, error)
                        is_told = True
                    time.sleep(_ROOM_POLL_S)
            finally:
                self.remove_files(folder)

    def write_files(self, folder: str, files: Files) -> None:
        """Write a folder on each host of the engine."""
        os.makedirs(folder, exist_ok=True)
        for name, data in files.items():
            Path(folder, name).write_bytes(data.data)

    def remove_files(self, folder: str) -> None:
        """Remove it from each host of the engine."""
        shutil.rmtree(folder, ignore_errors=True)

    # ---- calls

    def _living(self, purpose: str) -> ChildProcess:
        if self._server is None:
            raise RuntimeError(f"{purpose} of {self.spec.name}: it has not been started")
        if not self._server.alive():
            raise self._server.died(f"{purpose} of {self.spec.name} at {self.url}")
        return self._server

    def _call(
        self,
        method: str,
        path: str,
        payload: Mapping[str, object] | None = None,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> object:
        server = self._living(path)
        try:
            return super()._call(method, path, payload, timeout_s=timeout_s)
        except EndpointError:
            raise
        except RuntimeError as error:
            # No answer: where the server died meanwhile, its log says more than the broken connection.
            if server.wait_exit(2.0):
                raise server.died(f"{path} of {self.spec.name} at {self.url}") from error
            raise


def node_id() -> str:
    """Return the name of this process's node: Ray's, or without Ray the host's."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().get_node_id())
    return socket.gethostname()


class EnginePart(EngineActor):
    """The ranks of an engine on one of its other nodes. Part 0 serves; this server only reports whether its ranks live.

    `join` replaces `start`.
    """

    def join(self, meeting: str, bootstrap_port: int | None = None) -> None:
        """Start the server, whose ranks meet the others at `meeting` (host:port), and wait until the engine is whole.

        `bootstrap_port` is part 0's, where the engine prefills. Raises RuntimeError with the end of the log.
        """

        def spawn(ports: list[int]) -> ChildProcess:
            # Part 0 decides where the ranks meet, so SGLang ignores the second port. Set at once for `shutdown`.
            self._server = self._spawn_server(ports[0], ports[0], meeting, bootstrap_port)
            return self._server

        self.shutdown(0.0)  # of a try before this one
        self._server = start_on_free_ports([self.spec.host], spawn, lambda server: self._wait_for(server, "/health"))
        self._shared_memory |= shared_memory_of(self._server.pid)

    def remove_files(self, folder: str) -> None:
        """Remove it, and the folder above it, part 0's scratch folder on another host, if nothing else is there."""
        super().remove_files(folder)
        with suppress(OSError):
            os.rmdir(os.path.dirname(folder))
