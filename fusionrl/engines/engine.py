"""One SGLang engine: its server as a child process, and its control endpoints as methods.

`EngineActor` is a plain class that the cluster room turns into a Ray actor. Every method that talks to the
server raises RuntimeError with the endpoint, the status and the server's text when the server refuses, and
with the end of the server's log when the server is dead.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fusionrl.engines.http import EndpointError, call
from fusionrl.engines.process import ChildExited, ChildProcess, base_url, shared_memory_of, start_on_free_ports
from fusionrl.engines.spec import EngineSpec, server_command, server_environment
from fusionrl.models.scorers import read_scorer
from fusionrl.models.weight_files import tensor_names

__all__ = ["EngineActor", "EngineSpec"]

_WEIGHTS_TIMEOUT_S = 1800.0
_FLUSH_WAIT_S = 10
_CONTROL_TIMEOUT_S = 300.0
_HEADS_WITH_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


class EngineActor:
    """Starts, controls and ends one SGLang server."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.url = ""
        self._server: ChildProcess | None = None
        self._shared_memory: set[Path] = set()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        # None until asked: 0.5.17 has no /begin_weight_update, 0.5.23 refuses updates without it.
        self._has_update_sessions: bool | None = None
        self._is_paused_in_place = False

    # ---- life

    def start(self) -> str:
        """Start the server, wait until it has generated a token, and return its base URL.

        Raises RuntimeError with the end of the log when the server ends or is not ready after
        `spec.start_timeout_s` seconds.
        """
        if self._server is not None and self._server.alive():
            return self.url
        self._has_update_sessions, self._is_paused_in_place = None, False
        self._server = start_on_free_ports(self.spec.host, 2, self._spawn, self._wait_ready)
        if self.spec.role == "reward-model":
            self._clear_head_bias()
        self._shared_memory |= {
            path for path in shared_memory_of(self._server.pid) if path.name.startswith(("sgl_", "sglang_"))
        }
        return self.url

    def _spawn(self, ports: list[int]) -> ChildProcess:
        port, nccl_port = ports
        # SGLang leaves a handful of sockets in the temporary folder. A short path: a socket's has 107
        # characters.
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-", ignore_cleanup_errors=True)
        env = server_environment(self.spec)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
        env["TMPDIR"] = self._scratch.name
        self.url = base_url(self.spec.host, port)
        return ChildProcess(
            server_command(self.spec, port, nccl_port),
            os.path.join(self.spec.log_dir, f"{self.spec.role}-{self.spec.index}.log"),
            env=env,
            secret=self.spec.api_key,
        )

    def _wait_ready(self, server: ChildProcess) -> None:
        what = f"start of {self.spec.name} ({self.spec.model_path}) at {self.url}"
        server.wait_until(lambda: self._answers("/health"), self.spec.start_timeout_s, what)
        # The first forward pass, so that a model that loads but cannot run fails here.
        server.wait_until(lambda: self._answers("/health_generate"), self.spec.start_timeout_s, what)

    def _answers(self, path: str) -> bool:
        try:
            if path == "/health_generate" and self.spec.device == "cpu":
                # /health_generate sleeps a second before it looks for the token.
                payload = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
                path = "/classify" if self.spec.role == "reward-model" else "/generate"
                self._call("POST", path, payload, timeout_s=60.0, watch=False)
            else:
                self._call("GET", path, timeout_s=30.0, watch=False)
        except RuntimeError:
            return False
        return True

    def _clear_head_bias(self) -> None:
        """Set the bias of a classifier's head to 0 where the checkpoint has none.

        SGLang (0.5.23) gives Qwen2's and Qwen3's head a bias that transformers' has not, and leaves it at
        random: every score would be off by the same number, another one after each start.
        """
        model = read_scorer(self.spec.model_path, "model")
        if model.architecture in _HEADS_WITH_BIAS and "score.bias" not in tensor_names(self.spec.model_path):
            import torch

            from fusionrl.engines.payload import by_value

            zeros = by_value([("score.bias", torch.zeros(model.num_labels))])
            self.begin_weight_update()
            self.update_weights_from_tensor(
                [zeros] * self.spec.tp_size, load_format=None, version=None, flush_cache=True
            )
            self.end_weight_update()

    def info(self) -> dict[str, Any]:
        """`url`, `host`, `node_id` (Ray's, where there is one), `pid` of the server, `index` and
        `model_info`."""
        return {
            "index": self.spec.index,
            "url": self.url,
            "host": self.spec.host,
            "node_id": _node_id(),
            "pid": self._living("info").pid,
            "model_info": self._call("GET", "/model_info"),
        }

    def check_health(self) -> dict[str, Any]:
        """`url`, `pid` and `weight_version` of a living server.

        Raises RuntimeError with the end of the log when the server process is dead, and RuntimeError when it
        lives and does not answer. Holds while generation is paused and while memory is released.
        """
        server = self._living("health check")
        self._call("GET", "/health", timeout_s=30.0)
        return {"url": self.url, "pid": server.pid, "weight_version": self.weight_version()}

    def check_responds(self, timeout_s: float) -> None:
        """Return once the server has made a token; any will do, so a busy server is asked for none of its own.

        Raises RuntimeError when none comes within `timeout_s` seconds (over 1: SGLang looks once a second), and at
        once, with the end of the log, when the server process is dead. Not for a paused server, which makes none.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                self._call("GET", "/health_generate", timeout_s=left)
                return
            except ChildExited:
                raise
            except RuntimeError as error:  # a 503 after SGLang's own limit of 20 s is no answer either
                if time.monotonic() >= deadline:
                    raise RuntimeError(
                        f"engine {self.spec.index} at {self.url} made no token within {timeout_s:g} s"
                        f" (--rollout-health-check-timeout): {error}"
                    ) from error
            time.sleep(0.2)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """End the server and all its processes, by force after `timeout_s` seconds. Idempotent."""
        if self._server is not None:
            self._server.terminate(timeout_s=timeout_s)
        # SGLang leaves its own segments behind, 25 MB of message queue for each engine with tp_size > 1.
        while self._shared_memory:
            self._shared_memory.pop().unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.cleanup()

    # ---- generation

    def pause(self, mode: str = "abort") -> None:
        """Stop generating. Running requests: "abort" answers them as they are, "retract" keeps them without
        their KV cache, "in_place" with it.

        Until `resume` an "in_place" pause turns updates' `flush_cache` off: SGLang flushes nothing while requests are
        there, and fails the update. Such an engine has to be without a prefix cache (`disable_radix_cache`), else
        later requests find keys and values of the weights before in it.
        """
        self._post("/pause_generation", {"mode": mode})
        self._is_paused_in_place = mode == "in_place"

    def resume(self) -> None:
        """Go on after `pause`."""
        self._post("/continue_generation")
        self._is_paused_in_place = False

    def abort_all(self) -> None:
        """Answer all running and waiting requests as they are, finish reason "abort"."""
        self._post("/abort_request", {"abort_all": True})

    def flush_cache(self) -> None:
        """Empty the KV cache. Raises RuntimeError where requests still run after 10 s, or are paused in place."""
        try:
            self._post("/flush_cache")
        except EndpointError as error:
            if error.status != 400 or self._is_paused_in_place:
                raise
            # A request whose last token was answered leaves the scheduler a little later. Not asked for at first: with
            # a wait SGLang does not flush while it is paused and requests queue. 0.5.17 knows no wait.
            self._post(f"/flush_cache?timeout={_FLUSH_WAIT_S}")

    # ---- weights

    def begin_weight_update(self) -> None:
        """Open the session that updates by tensor or broadcast have to lie in, where the server knows
        sessions."""
        if self._has_update_sessions is False:
            return
        try:
            self._post("/begin_weight_update")
            self._has_update_sessions = True
        except EndpointError as error:
            if "already open" in str(error):  # of an update that failed, and whose end the server missed
                self._post("/end_weight_update")
                self._post("/begin_weight_update")
                self._has_update_sessions = True
                return
            if error.status != 404:
                raise
            self._has_update_sessions = False

    def end_weight_update(self) -> None:
        """Close the session that `begin_weight_update` has opened."""
        if self._has_update_sessions:
            self._post("/end_weight_update")

    def update_weights_from_tensor(
        self, serialized: list[str], *, load_format: str | None, version: str | None, flush_cache: bool
    ) -> None:
        """Load tensors that the payload holds or points to; see `fusionrl.engines.payload`.

        `serialized` has one base64 string for each tensor-parallel rank of this engine.
        """
        if len(serialized) != self.spec.tp_size:
            raise ValueError(f"{len(serialized)} payloads for tp_size={self.spec.tp_size}: one a rank is needed")
        payload = {
            "serialized_named_tensors": serialized,
            "load_format": load_format,
            "weight_version": version,
            "flush_cache": flush_cache and not self._is_paused_in_place,
        }
        self._post("/update_weights_from_tensor", payload, timeout_s=_WEIGHTS_TIMEOUT_S)

    def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join the group of `fusionrl.sync.group.init_external_group` as ranks `rank_offset...`.

        Blocks until all `world_size` ranks are there, so rank 0 has to join at the same time.
        """
        payload = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._post("/init_weights_update_group", payload, timeout_s=_WEIGHTS_TIMEOUT_S)

    def update_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        version: str | None,
        load_format: str | None,
        flush_cache: bool,
    ) -> None:
        """Receive tensors that rank 0 of `group_name` broadcasts meanwhile, and load them.

        `dtypes` are torch's names ("float32"). One broadcast a tensor, in this order, or for the load format
        "flattened_bucket" a single uint8 one with all bytes one after another, without padding.
        """
        payload = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group_name,
            "weight_version": version,
            "load_format": load_format,
            "flush_cache": flush_cache and not self._is_paused_in_place,
        }
        self._post("/update_weights_from_distributed", payload, timeout_s=_WEIGHTS_TIMEOUT_S)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the group."""
        self._post("/destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_disk(self, path: str, version: str | None) -> None:
        """Load the Hugging Face checkpoint in `path`. Needs no session."""
        flush = not self._is_paused_in_place
        payload = {"model_path": os.path.abspath(path), "weight_version": version, "flush_cache": flush}
        self._post("/update_weights_from_disk", payload, timeout_s=_WEIGHTS_TIMEOUT_S)

    def pull_weights(self, folder: str, local_folder: str | None) -> str | None:
        """Bring this host's copy to the version in `folder`; see `fusionrl.engines.local_copy.pull_version`."""
        from fusionrl.engines.local_copy import pull_version

        return pull_version(folder, local_folder)

    def drop_local_copy(self, local_folder: str) -> None:
        """Remove this host's copy of the weights."""
        shutil.rmtree(local_folder, ignore_errors=True)

    def weight_version(self) -> str:
        """Version stamped by the last update; "0" before the first."""
        return str(self._call("GET", "/model_info")["weight_version"])

    # ---- memory

    def release_memory(self, tags: list[str] | None) -> None:
        """Give device memory back ("kv_cache", "weights", None for all). Needs `enable_memory_saver` on a
        GPU and an engine without running requests; a CPU engine accepts it and keeps its memory."""
        self._post("/release_memory_occupation", {} if tags is None else {"tags": tags})

    def resume_memory(self, tags: list[str] | None) -> None:
        """Take back what `release_memory` gave; the contents of released weights are undefined until
        updated."""
        self._post("/resume_memory_occupation", {} if tags is None else {"tags": tags})

    # ---- calls

    def _living(self, what: str) -> ChildProcess:
        if self._server is None:
            raise RuntimeError(f"{what} of {self.spec.name}: it has not been started")
        if not self._server.alive():
            raise self._server.died(f"{what} of {self.spec.name} at {self.url}")
        return self._server

    def _post(self, path: str, payload: dict[str, Any] | None = None, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        return self._call("POST", path, payload or {}, timeout_s=timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout_s: float = _CONTROL_TIMEOUT_S,
        watch: bool = True,
    ) -> Any:
        if watch:
            self._living(path)
        try:
            return call(method, self.url + path, payload, api_key=self.spec.api_key, timeout_s=timeout_s)
        except EndpointError:
            raise
        except RuntimeError as error:
            # No answer: where the server died meanwhile, its log says more than the broken connection.
            if watch:
                self._server_death(path, error)
            raise

    def _server_death(self, path: str, cause: RuntimeError) -> None:
        assert self._server is not None
        if self._server.wait_exit(2.0):
            raise self._server.died(f"{path} of {self.spec.name} at {self.url}") from cause


def _node_id() -> str:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().get_node_id())
    return socket.gethostname()
