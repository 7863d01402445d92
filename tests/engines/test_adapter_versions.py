"""Versions of adapters in a server: which one a request gets, when one goes, and when a load is over."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fusionrl.engines import adapter_versions
from fusionrl.engines.adapter_versions import BASE, AdapterVersions


def test_names_of_requests_and_of_loads() -> None:
    versions = AdapterVersions(("math", "code"))
    assert versions.find("math") is versions.find(BASE) is None, "the weights alone before a push"
    versions.current["math"], versions.version_of["math@1"] = "math@1", "1"
    assert versions.find("math") == versions.find("math@1") == "math@1" and versions.find("code") is None
    for unknown in ("poetry", "math@2", "@1"):
        with pytest.raises(ValueError, match="no such adapter; known are math, code, base"):
            versions.find(unknown)
    assert [versions.new("code@7") for _ in range(2)] == [("code", "7", "code@7"), ("code", "7", "code@7.2")]
    for unknown in ("code", "poetry@1", "base@1"):
        with pytest.raises(ValueError, match="is not NAME@VERSION"):
            versions.new(unknown)


def test_requests_without_a_name() -> None:
    """A health check holds no version: SGLang forgets it without saying that it has ended."""
    for names in (("policy",), ("math", "code")):
        assert AdapterVersions(names).default("HEALTH_CHECK_1") == BASE
    assert AdapterVersions(("policy",)).default("1") == "policy"
    with pytest.raises(ValueError, match="lora_path is missing: it is one of math, code, base"):
        AdapterVersions(("math", "code")).default("1")


class Count:
    """As SGLang's counter of requests, by hand."""

    def __init__(self) -> None:
        self.number, self.changed = 1, asyncio.Event()

    def value(self) -> int:
        return self.number

    async def wait_for_zero(self) -> None:
        while self.number:
            await self.changed.wait()


def test_a_version_goes_when_its_last_request_has_ended(monkeypatch: Any) -> None:
    """Also one that has chosen it and is not counted yet."""
    structs: Any = ModuleType("io_struct")
    structs.UnloadLoRAAdapterReqInput = SimpleNamespace
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)

    async def run() -> list[str]:
        count, gone, versions = Count(), list[str](), AdapterVersions(("policy",))
        versions.version_of["policy@1"] = "1"

        async def unload(request: Any) -> Any:
            gone.append(request.lora_name)
            return SimpleNamespace(success=True)

        ref = SimpleNamespace(lora_id="id")
        registry = SimpleNamespace(_counters={"id": count}, get_all_adapters=lambda: {"policy@1": ref})
        manager: Any = SimpleNamespace(lora_registry=registry, unload_lora_adapter=unload, lora_ref_cache={})
        task = asyncio.create_task(adapter_versions._unload(manager, "policy@1", versions))
        with versions.held(["policy@1", None]):
            count.number = 0
            count.changed.set()
            await asyncio.sleep(0.05)
            assert not gone and "policy@1" in versions.version_of
        await task
        assert not versions.version_of
        return gone

    assert asyncio.run(run()) == ["policy@1"]


@pytest.mark.parametrize("failures", [[None, None], [None, "no such file"], ["no such file", None]])
def test_a_load_is_over_when_all_ranks_have_it_or_none(failures: list[str | None], monkeypatch: Any) -> None:
    """SGLang answers as soon as the first has loaded, whose folder may then be gone for the others."""
    unloaded, gathered = list[str](), list[str | None]()

    def gather(found: list[str | None], own: str | None, group: object) -> None:
        gathered.append(own)
        found[:] = failures

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    result = SimpleNamespace(success=failures[0] is None, error_message=failures[0])
    runner = SimpleNamespace(unload_lora_adapter=unloaded.append)
    scheduler: Any = SimpleNamespace(tp_cpu_group=None, tp_worker=SimpleNamespace(model_runner=runner))
    request: Any = SimpleNamespace(to_ref=lambda: "ref")
    schedulers: Any = SimpleNamespace(Scheduler=SimpleNamespace(load_lora_adapter=lambda self, request: result))
    adapter_versions._agree_on_loads(schedulers)
    answer = schedulers.Scheduler.load_lora_adapter(scheduler, request)
    assert gathered == failures[:1] and answer.success == (failures == [None, None])
    assert unloaded == (["ref"] if failures[0] is None and failures[1] else [])
    assert answer.success or ("rank" in answer.error_message and "no such file" in answer.error_message)
