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
from fusionrl.engines.answers import as_list, as_object
from fusionrl.engines.http import EndpointError, call
from fusionrl.engines.process import ChildExited, ChildProcess, base_url, shared_memory_of, start_on_free_ports
from fusionrl.engines.spec import EngineSpec, server_command, server_environment
from fusionrl.models.engine_config import read_scorer, text_view
from fusionrl.models.hf_folder import stored_tensors
from fusionrl.observe.spans import phase

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

_WEIGHTS_TIMEOUT_S = 1800.0
_FLUSH_WAIT_S = 10
CONTROL_TIMEOUT_S = 300.0


class EngineControl:
    """Controls the server at `url`, which any process may have started."""

    def __init__(self, url: str, tp_size: int, api_key: str | None) -> None:
        self.url = url
        self._tp_size, self._api_key = tp_size, api_key
        # None until asked: 0.5.17 has no /begin_weight_update, 0.5.23 refuses updates without it.
        self._has_update_sessions: bool | None = None
        self._is_paused_in_place = False
        self._groups = set[str]()  # in which trainers broadcast weights

    def _post(
        self, path: str, payload: Mapping[str, object] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> object:
        return self._call("POST", path, payload or {}, timeout_s=timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        payload: Mapping[str, object] | None = None,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> object:
        return call(method, self.url + path, payload, api_key=self._api_key, timeout_s=timeout_s)

    # ---- profiles

    def start_profile(self, tool: str, folder: str, name: str) -> None:
        """Begin a profile of every rank, whose file in `folder` begins with `name`; `tool`: torch, memory or nsys."""
        activities = {"torch": ["CPU", "GPU"], "memory": ["MEM"], "nsys": ["CUDA_PROFILER"]}[tool]
        payload = {"output_dir": folder, "profile_id": name, "activities": activities, "with_stack": False}
        self._post("/start_profile", payload)

    def stop_profile(self) -> None:
        self._post("/stop_profile")

    # ---- generation

    @phase("pause")
    def pause(self, mode: str = "abort") -> None:
        """Stop generating. Running requests: "abort" answers them as they are, "retract" keeps them without
        their KV cache, "in_place" with it.

        Until `resume` an "in_place" pause turns updates' `flush_cache` off: SGLang flushes nothing while requests are
        there, and fails the update. Such an engine has to be without a prefix cache (`disable_radix_cache`), else
        later requests find keys and values of the weights before in it.
        """
        self._post("/pause_generation", {"mode": mode})
        self._is_paused_in_place = mode == "in_place"

    @phase("resume")
    def resume(self) -> None:
        self._post("/continue_generation")
        self._is_paused_in_place = False

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

    @phase("begin weights")
    def begin_weight_update(self) -> None:
        """Open the session that updates by tensor or broadcast need, where the server knows sessions."""
        if self._has_update_sessions is False:
            return
        try:
            self._post("/begin_weight_update")
            self._has_update_sessions = True
        except EndpointError as error:
            if "already open" in str(error):  # of an update that failed, and whose end the server missed
                self._post("/end_weight_update")
                self._post("/begin_weight_update")
            elif error.status != 404:
                raise
            self._has_update_sessions = error.status != 404

    @phase("end weights")
    def end_weight_update(self) -> None:
        if self._has_update_sessions:
            self._post("/end_weight_update")

    @phase("load weights")
    def update_weights_from_tensor(
        self, serialized: list[str], *, load_format: str | None, version: str | None, flush_cache: bool
    ) -> None:
        """Load tensors that the payload holds or points to; see `fusionrl.engines.weight_payload`.

        `serialized` has one base64 string for each tensor-parallel rank of this engine.
        """
        if len(serialized) != self._tp_size:
            raise ValueError(f"{len(serialized)} payloads for tp_size={self._tp_size}: one a rank is needed")
        payload = {
            "serialized_named_tensors": serialized,
            "load_format": load_format,
            "weight_version": version,
            "flush_cache": flush_cache and not self._is_paused_in_place,
        }
        self._post("/update_weights_from_tensor", payload, timeout_s=_WEIGHTS_TIMEOUT_S)

    @phase("join weight group")
    def init_weights_update_group(self, **group: object) -> None:
        """Join the group of `fusionrl.weights.broadcast.init_external_group` as ranks `rank_offset...`.

        `group` has the request's fields in SGLang: master_address, master_port, rank_offset, world_size, group_name and
        backend. Blocks until all `world_size` ranks are there, so rank 0 has to join at the same time.
        """
        self._post("/init_weights_update_group", group, timeout_s=_WEIGHTS_TIMEOUT_S)
        self._groups.add(str(group["group_name"]))

    @phase("load weights")
    def update_weights_from_distributed(self, *, version: str | None, flush_cache: bool, **bucket: object) -> None:
        """Receive tensors that rank 0 of a group broadcasts meanwhile, and load them.

        `bucket` has the request's fields in SGLang: names, dtypes (torch's names, such as "float32"), shapes,
        group_name and load_format. One broadcast a tensor, in this order, or for the load format "flattened_bucket" a
        single uint8 one with all bytes one after another, without padding.
        """
        flush = flush_cache and not self._is_paused_in_place
        payload = {**bucket, "weight_version": version, "flush_cache": flush}
        self._post("/update_weights_from_distributed", payload, timeout_s=_WEIGHTS_TIMEOUT_S)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the group."""
        self._groups.discard(group_name)
        self._post("/destroy_weights_update_group", {"group_name": group_name})

    def leave_groups(self) -> None:
        """Leave all groups, of trainers that are gone or of which the server is to know nothing any more."""
        groups, self._groups = sorted(self._groups), set()
        for name in groups:
            with suppress(RuntimeError):  # the server is gone, or was not in it any more
                self._post("/destroy_weights_update_group", {"group_name": name}, timeout_s=10.0)

    @phase("load weights")
    def update_weights_from_disk(self, path: str, version: str | None) -> None:
        """Load the Hugging Face checkpoint in `path`. Needs no session."""
        flush = not self._is_paused_in_place
        payload = {"model_path": os.path.abspath(path), "weight_version": version, "flush_cache": flush}
        self._post("/update_weights_from_disk", payload, timeout_s=_WEIGHTS_TIMEOUT_S)

    def weight_version(self) -> str:
        """Version stamped by the last update; "0" before the first."""
        return str(as_object(self._call("GET", "/model_info"), "/model_info")["weight_version"])

    def weight_checksums(self) -> list[dict[str, str]] | None:
        """Engine rank → tensor name → hash, as the server reports them; None where its version cannot."""
        try:
            answer = self._call("POST", "/weights_checker", {"action": "checksum"})
        except EndpointError as error:
            if error.status in (404, 405):
                return None
            raise
        checksums = []
        for rank in as_list(as_object(answer, "/weights_checker")["ranks"], "ranks of /weights_checker"):
            by_name = as_object(as_object(rank, "a rank")["checksums"], "checksums of a rank")
            checksums.append(dict(zip(by_name, map(str, by_name.values()), strict=True)))
        return checksums

    # ---- memory

    @phase("release memory")
    def release_memory(self, tags: list[str] | None) -> None:
        """Give device memory back ("kv_cache", "weights", None for all). Needs `enable_memory_saver` on a
        GPU and an engine without running requests; a CPU engine accepts it and keeps its memory."""
        self._post("/release_memory_occupation", {} if tags is None else {"tags": tags})

    @phase("resume memory")
    def resume_memory(self, tags: list[str] | None) -> None:
        """Take back what `release_memory` gave; the contents of released weights are undefined until updated."""
        self._post("/resume_memory_occupation", {} if tags is None else {"tags": tags})


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
        self._num_loads = 0  # of adapters

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
        """Bring this host's copy to the version in `folder`; see `fusionrl.engines.disk_versions.pull_version`."""
        from fusionrl.engines.disk_versions import pull_version

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
        self._num_loads = number = self._num_loads + 1
        for name, files in adapters.items():
            folder = os.path.join(self._scratch.name, f"{name}-{version}-{number}")
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
                    if number != self._num_loads:  # the trainers of this one are gone
                        raise RuntimeError("another push of adapters replaces this one")
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

    `start_part` replaces `start`.
    """

    def start_part(self, meeting: str, bootstrap_port: int | None = None) -> None:
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
