"""A step's numbers of the machines: pooled over processes, and by device. Actors are plain objects, Ray is a fake."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fusionrl.models.shape import read_model_shape, shape_from_hf_config
from fusionrl.observe import spans
from fusionrl.plan.costs import ImageCost, SequenceCost, Work, train_flops
from fusionrl.runtime import telemetry
from fusionrl.runtime.supervisor import ActorRegistry
from fusionrl.runtime.telemetry import ClockOffsets, HardwareMetrics, pooled

REPO = Path(__file__).parents[2]
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 << 30}


class Actor:
    """A process that answers, or (None) does not in time."""

    def __init__(self, numbers: dict[str, float] | None, *gpus: dict[str, Any]) -> None:
        self.hardware = SimpleNamespace(remote=lambda: numbers)
        self.hardware_facts = SimpleNamespace(remote=lambda: {"gpus": list(gpus)})


@pytest.fixture
def hardware_of(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """hardware_of(trainers, engines, peak=None) -> HardwareMetrics, whose file is tmp_path/hardware.json."""

    def wait(references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [one for one in references if one is not None], [one for one in references if one is None]

    error = SimpleNamespace(RayError=OSError)
    monkeypatch.setattr(telemetry, "ray", SimpleNamespace(wait=wait, get=lambda one: one, exceptions=error))

    def make(trainers: list[Actor], engines: list[Actor], peak: float | None = None) -> HardwareMetrics:
        layout = SimpleNamespace(world_size=len(trainers)) if trainers else None
        shape = read_model_shape(tiny_model)
        plan: Any = SimpleNamespace(layout=layout, shape=shape, balance=None, num_engines=len(engines))
        plan.engine_bundles = tuple((index,) for index in range(len(engines)))
        groups: Any = SimpleNamespace(policy=trainers, auxiliaries=[])
        pool: Any = SimpleNamespace(everyone=engines, left_out=set())
        buffer: Any = SimpleNamespace(is_started=True, actor=Actor({"host_bytes": 5.0}))
        return HardwareMetrics(plan, groups, pool, buffer, tmp_path / "hardware.json", peak)

    return make


def test_numbers_of_a_group_are_pooled() -> None:
    names = ("host_bytes", "host_peak_bytes", "utilisation", "power_w", "temperature_c")
    numbers = ((3.0, 9.0, 0.5, 100.0, 60.0), (4.0, 5.0, 1.0, 300.0, 71.0), (7.0, 9.0, 0.75, 200.0, 71.0))
    one, other, both = (dict(zip(names, values, strict=True)) for values in numbers)
    assert pooled([one, other]) == both and pooled([]) == {}


def test_speeds_are_of_one_device(hardware_of: Any, tiny_model: Path, tmp_path: Path) -> None:
    measured = hardware_of([Actor({"host_bytes": 1.0}, H100)] * 2, [Actor({"host_bytes": 2.0}, H100)] * 4)
    measured._plan.engine_bundles = ((0, 1, 2, 3), (4,), (5,), (6,))  # engines of groups differ in size
    work = Work.of([30, 50])
    values = {"perf/time_train_s": 2.0, "perf/time_generate_s": 4.0, "rollout/num_tokens": 64.0}
    found = measured.measure(values, work)
    assert found["perf/train_tokens_per_s_per_device"] == 80 / 2.0 / 2
    assert found["perf/generate_tokens_per_s_per_device"] == 64 / 4.0 / 7
    assert found["perf/mfu"] == pytest.approx(train_flops(read_model_shape(tiny_model), work) / (2.0 * 2 * 989e12))
    assert [found[f"hardware/host_bytes/{name}"] for name in ("trainers", "engines", "buffer")] == [2.0, 8.0, 5.0]
    assert found["hardware/host_bytes/driver"] > 1 << 20
    written = json.loads((tmp_path / "hardware.json").read_text())
    assert [len(written[name]) for name in ("trainers", "engines")] == [2, 4]
    assert written["trainers"][0]["gpus"] == [H100]
    measured._engines.left_out = {0}
    assert measured.measure(values, work)["perf/generate_tokens_per_s_per_device"] == 64 / 4.0 / 3


def test_images_have_a_share_of_the_work(hardware_of: Any) -> None:
    """One image of 448 x 448 that two samples have: 1,024 patches, which pass the tower once."""
    config = json.loads((REPO / "tests/recipes/configs/qwen2.5-vl-7b.json").read_text())
    shape, measured = shape_from_hf_config(config, sees=True), hardware_of([Actor({})], [])
    assert shape.vision is not None
    images = ImageCost.of_shape(shape.vision, is_trained=True)
    measured._plan.shape, measured._plan.balance = shape, SimpleNamespace(images=images)
    found = measured.measure({"perf/time_train_s": 2.0}, Work.of([300, 300], [256]))
    text = SequenceCost.of_shape(shape)([300, 300]).sum()
    assert found["train/patches"] == 1024
    assert found["train/image_share"] == pytest.approx(images(256) / (images(256) + text))


def test_a_peak_of_the_users_goes_first_and_without_one_there_is_no_share(hardware_of: Any) -> None:
    values, work = {"perf/time_train_s": 2.0}, Work.of([10])
    on_cpu = hardware_of([Actor({})], []).measure(values, work)
    assert "perf/mfu" not in on_cpu and "perf/generate_tokens_per_s_per_device" not in on_cpu
    own = hardware_of([Actor({}, H100)], [], peak=0.001).measure(values, work)
    table = hardware_of([Actor({}, H100)], []).measure(values, work)
    assert own["perf/mfu"] == pytest.approx(table["perf/mfu"] * 989e12 / 1e9)


def test_who_does_not_answer_is_left_out(hardware_of: Any) -> None:
    found = hardware_of([Actor({"host_bytes": 1.0}), Actor(None)], []).measure({}, Work())
    assert found["hardware/host_bytes/trainers"] == 1.0
    assert not any(name.startswith("perf/") for name in found)


def test_gpus_that_are_not_known_at_the_first_step_are_asked_for_again(hardware_of, caplog, tmp_path) -> None:
    actor = Actor({"host_bytes": 1.0}, H100)
    facts, actor.hardware_facts = actor.hardware_facts, SimpleNamespace(remote=lambda: None)
    measured = hardware_of([actor], [])
    values, work = {"perf/time_train_s": 2.0}, Work.of([10])
    assert not any("perf/mfu" in measured.measure(values, work) for _ in range(2))
    assert caplog.text.count("lacks some trainers") == 1
    actor.hardware_facts = facts
    assert "perf/mfu" in measured.measure(values, work)
    assert json.loads((tmp_path / "hardware.json").read_text())["trainers"][0]["gpus"] == [H100]


# ---------------------------------------------------- clocks of other machines, again after every step
AHEAD_NS = 9_000_000_000


class Clock:
    """A process of a machine with the boot `boot`; None: it is dead."""

    def __init__(self, boot: str | None) -> None:
        self.clock, self._boot = SimpleNamespace(remote=lambda: self), boot

    def answer(self) -> tuple[str, int]:
        if self._boot is None:
            raise ray.exceptions.ActorDiedError
        return self._boot, time.monotonic_ns() + AHEAD_NS


def test_a_process_that_died_ends_no_step_and_its_successor_or_another_one_is_asked(
    tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(telemetry, "ray", SimpleNamespace(get=lambda clock, timeout: clock.answer()))
    spans.record_to(tmp_path, "driver", 1)
    registry: Any = ActorRegistry()
    actors = {"engine 0": "boot-2", "engine 1": "boot-2", "engine 2": "boot-3", "trainer rank 0": None}
    for name, boot in actors.items():
        registry.add(name, Clock(boot), tmp_path)
    clocks, file = ClockOffsets(registry), tmp_path / "timeline" / "driver.a1.jsonl"

    def measured() -> list[str]:
        return [json.loads(line)[1] for line in file.read_text().splitlines()[1:]]

    clocks.find()
    assert measured() == ["boot-2", "boot-3"]
    *_, offset, error = json.loads(file.read_text().splitlines()[1])
    assert abs(offset - AHEAD_NS) <= error + 1_000 < 5_000_000
    registry.add("engine 0", Clock(None), tmp_path)
    registry.add("engine 2", Clock("boot-3"), tmp_path)
    clocks.measure()
    assert measured()[2:] == ["boot-3"]
    clocks.measure()
    assert measured()[3:] == ["boot-2", "boot-3"]
    registry.forget([member.handle for member in registry if member.name == "engine 2"])
    caplog.clear()
    clocks.measure()
    assert measured()[5:] == ["boot-2"] and not caplog.records, "its machine is left out"
    spans.stop_recording()
