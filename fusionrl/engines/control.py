"""The control endpoints of an SGLang server as methods: generation, weights, memory.

Every method raises RuntimeError with the endpoint, the status and the server's text when the server refuses.
"""

import os
from collections.abc import Mapping

from fusionrl.engines.http import EndpointError, as_list, as_object, call
from fusionrl.observe.spans import phase

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
        self._post("/destroy_weights_update_group", {"group_name": group_name})

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
        ranks = as_list(as_object(answer, "/weights_checker")["ranks"], "ranks of /weights_checker")
        checksums_by_rank = [as_object(as_object(rank, "a rank")["checksums"], "checksums of a rank") for rank in ranks]
        return [{name: str(checksum) for name, checksum in checksums.items()} for checksums in checksums_by_rank]

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
