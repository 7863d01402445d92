"""Versions of adapters (LoRA) in an SGLang server, put into it from outside, on every device.

A push loads an adapter under `NAME@VERSION`, which becomes the current version of NAME. A request names NAME (with one
adapter alone it need not), and gets the version that is current as it arrives; it keeps it to its end, and its answer
is stamped with it. So nothing pauses for a push, and no client knows versions. `base` is the weights without adapter,
and so is a NAME before its first push. A version that is not current any more is unloaded when its requests have ended;
if those of older versions leave no room for another one, a load is refused with `NO_ROOM`, to be tried again.

SGLang answers a load when rank 0 alone has loaded. Here all tensor-parallel ranks agree first: a folder may be removed
then, and if one rank fails, none has the adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from fusionrl.base.imports import when_imported
from fusionrl.base.wording import BASE

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq, BatchStrOutput, GenerateReqInput
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput as LoadRequest
    from sglang.srt.managers.io_struct import LoRAUpdateOutput as LoadResult
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.utils.weight_versions import WeightVersionSpan

    Load: TypeAlias = Callable[..., Awaitable[LoadResult]]

logger = logging.getLogger(__name__)

NO_ROOM = "no room for another version"
_POLL_S = 0.01  # between two looks at the requests of a version that is about to be unloaded
_HEALTH_CHECK = "HEALTH_CHECK"  # SGLang's own requests have it in their id


class AdapterVersions:
    """The versions that a server has loaded, by the names that SGLang knows them by. Belongs to one event loop."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.current: dict[str, str] = {}  # NAME → SGLang's name
        self.version_of: dict[str, str] = {}  # SGLang's name → version, of all that may still answer
        self.arriving: Counter[str] = Counter()  # requests that SGLang does not count yet
        self._num_loads: Counter[str] = Counter()

    def find(self, name: str) -> str | None:
        """Return SGLang's name of what a request for `name` gets; None: the weights alone.

        Raises ValueError for an unknown name.
        """
        if name == BASE:
            return None
        if name in self.names:
            return self.current.get(name)
        if name in self.version_of:
            return name
        known = ", ".join((*self.names, BASE))
        raise ValueError(f"lora_path {name!r}: the engine has no such adapter; known are {known}")

    def default(self, request_id: object) -> str:
        """Return the name of a request that has none.

        Raises ValueError: there are several adapters.
        """
        if _HEALTH_CHECK in str(request_id):
            return BASE  # SGLang forgets such a request as soon as any other makes a token, and its adapter's count
        if len(self.names) == 1:
            return self.names[0]
        raise ValueError(f"lora_path is missing: it is one of {', '.join((*self.names, BASE))}")

    def new(self, name: str) -> tuple[str, str, str]:
        """Return (NAME, version, a name that SGLang does not know yet) for a load of `NAME@VERSION`.

        Raises ValueError: `name` is none of these.
        """
        adapter, _, version = name.rpartition("@")
        if adapter not in self.names:
            raise ValueError(f"lora_name {name!r}: it is not NAME@VERSION with one of {', '.join(self.names)}")
        self._num_loads[name] += 1
        again = self._num_loads[name]  # a push that failed elsewhere is repeated
        return adapter, version, name if again == 1 else f"{name}.{again}"

    @contextmanager
    def held(self, chosen: Sequence[str | None]) -> Iterator[None]:
        """Keep versions loaded within it, until SGLang counts the requests that have chosen them."""
        names = [name for name in chosen if name is not None]
        self.arriving.update(names)
        try:
            yield
        finally:
            self.arriving.subtract(names)


def register(names: Sequence[str]) -> None:
    """Give servers and schedulers of this process, and of those forked from it, the adapters `names`; call it once."""
    versions = AdapterVersions(names)
    when_imported("sglang.srt.managers.io_struct", lambda module: _name_requests(module, versions))
    when_imported("sglang.srt.managers.tokenizer_manager", lambda module: _serve_versions(module, versions))
    when_imported("sglang.srt.managers.scheduler", _agree_on_loads)


def _name_requests(structs: ModuleType, versions: AdapterVersions) -> None:
    """Give each request the name of an adapter, before SGLang takes a batch apart."""

    def naming(original: Callable[[GenerateReqInput], None]) -> Callable[[GenerateReqInput], None]:
        def normalize_batch_and_arguments(self: GenerateReqInput) -> None:
            if isinstance(self.lora_path, list):
                self.lora_path = [name or versions.default(self.rid) for name in self.lora_path]
            else:
                self.lora_path = self.lora_path or versions.default(self.rid)
            original(self)

        return normalize_batch_and_arguments

    for kind in (structs.GenerateReqInput, structs.EmbeddingReqInput):
        kind.normalize_batch_and_arguments = naming(kind.normalize_batch_and_arguments)


def _serve_versions(managers: ModuleType, versions: AdapterVersions) -> None:
    kind = managers.TokenizerManager
    resolve, handle_output = kind._validate_and_resolve_lora, kind._handle_batch_output
    handle_abort = kind._handle_abort_req

    async def validate_and_resolve(self: TokenizerManager, obj: GenerateReqInput) -> None:
        """Choose the versions that are current now. Raises ValueError, which is answered with 400."""
        names = obj.lora_path if isinstance(obj.lora_path, list) else [obj.lora_path]
        chosen = [versions.find(name) for name in names]
        obj.lora_path = chosen if isinstance(obj.lora_path, list) else chosen[0]
        for number, part in obj.__dict__.get("_sub_obj_cache", {}).items():
            part.lora_path = chosen[number]
        with versions.held(chosen):
            await resolve(self, obj)

    def spans(self: TokenizerManager, request_id: str, num_tokens: int) -> list[WeightVersionSpan] | None:
        """Return the stamp of an answer; None: the weights alone answered."""
        from sglang.srt.utils.weight_versions import WeightVersionSpan

        state = self.rid_to_state.get(request_id)
        name = None if state is None else state.obj.lora_path
        version = versions.version_of.get(name) if isinstance(name, str) else None
        return None if version is None else [WeightVersionSpan(version=version, start=0, end=num_tokens)]

    async def handle_batch_output(self: TokenizerManager, output: BatchStrOutput) -> None:
        if hasattr(output, "weight_versions"):
            stamps = output.weight_versions or [None] * len(output.rids)
            pairs = zip(output.rids, output.completion_tokens, stamps, strict=True)
            output.weight_versions = [spans(self, rid, count) or stamp for rid, count, stamp in pairs]
        await handle_output(self, output)

    def handle_abort_request(self: TokenizerManager, output: AbortReq) -> None:
        state = self.rid_to_state.get(output.rid)
        if state is not None:
            output.weight_versions = spans(self, output.rid, len(state.output_ids)) or output.weight_versions
        handle_abort(self, output)

    kind._validate_and_resolve_lora = validate_and_resolve
    kind._handle_batch_output = handle_batch_output
    kind._handle_abort_req = handle_abort_request
    kind.load_lora_adapter = _loading(kind.load_lora_adapter, managers, versions)


def _loading(load: Load, managers: ModuleType, versions: AdapterVersions) -> Load:
    tasks = set[asyncio.Task[None]]()

    async def load_version(self: TokenizerManager, obj: LoadRequest, request: object = None) -> LoadResult:
        """Load `NAME@VERSION`, make it the current version of NAME, and unload the one before when it is unused.

        The load fails, and the version before stays current, if the slots are full or the name or the files do not fit.
        """
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqOutput

        if len(versions.version_of) >= managers.get_lora().max_loras_per_batch - 1:
            loaded = ", ".join(versions.version_of)
            return LoadLoRAAdapterReqOutput(success=False, error_message=f"{NO_ROOM}: requests still use {loaded}")
        try:
            adapter, version, obj.lora_name = versions.new(obj.lora_name)
        except ValueError as error:
            return LoadLoRAAdapterReqOutput(success=False, error_message=str(error))
        result = await load(self, obj, request)
        if result.success:
            before = versions.current.get(adapter)
            versions.current[adapter], versions.version_of[obj.lora_name] = obj.lora_name, version
            self._update_weight_version_if_provided(version)
            if before is not None:
                task = asyncio.create_task(_unload(self, before, versions))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        return result

    return load_version


async def _unload(manager: TokenizerManager, name: str, versions: AdapterVersions) -> None:
    """Unload a version that no new request gets, when the last of its requests has ended.

    SGLang would wait for them as well, but lets no other adapter be loaded meanwhile.
    """
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    registry = manager.lora_registry
    count = registry._counters[registry.get_all_adapters()[name].lora_id]
    while count.value() or versions.arriving[name]:
        await count.wait_for_zero()
        await asyncio.sleep(_POLL_S)
    del versions.version_of[name], versions.arriving[name]
    result = await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
    manager.lora_ref_cache.pop(name, None)  # a request for it would load its folder again, which is gone
    if not result.success:
        logger.warning("adapter %s is not unloaded: %s", name, result.error_message)


def _agree_on_loads(schedulers: ModuleType) -> None:
    load: Callable[[Scheduler, LoadRequest], LoadResult] = schedulers.Scheduler.load_lora_adapter

    def load_on_all(self: Scheduler, request: LoadRequest) -> LoadResult:
        import torch.distributed as dist

        result = load(self, request)
        failures: list[str | None] = [None] * dist.get_world_size(self.tp_cpu_group)
        dist.all_gather_object(failures, None if result.success else result.error_message, group=self.tp_cpu_group)
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
        if texts and result.success:
            self.tp_worker.model_runner.unload_lora_adapter(request.to_ref())
            result.success = False
        result.error_message = "; ".join(texts)
        return result

    schedulers.Scheduler.load_lora_adapter = load_on_all
