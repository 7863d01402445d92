"""Versions of the weights as files: what two ranks write, what a host makes of it, and what becomes of damage."""

import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fusionrl.engines.disk_versions import DamagedVersion, Manifest, _check_file, pull_version
from fusionrl.plan.layout import TrainerLayout
from fusionrl.weights.disk import DiskOptions, DiskWriter
from tests.trainer.trainer_worker import Failed, LocalRanks, Samples, config_of, limit_files, weights


# --- functions that run in a rank ---
def make_writer(actor: Any, options: DiskOptions) -> None:
    from fusionrl.models.hf_io import iter_hf_tensors

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        trained = actor.trained
        for name, tensor in iter_hf_tensors(trained.chunks, trained.transformer, actor.shape):
            yield name, tensor.detach().to(torch.bfloat16)

    actor.writer = DiskWriter(options, rank=actor.rank, world_size=actor.layout.world_size, export=export)


def write(actor: Any, version: int, is_full: bool = False) -> dict[str, Any]:
    return actor.writer.write_full(version) if is_full else actor.writer.write(version)


def drop(actor: Any, keep: int | None) -> None:
    if actor.rank == 0:
        actor.writer.drop(keep)


class Trained:
    """A model of two ranks: trained, written, and taken over by a host. Engines' weights are bf16, trainers' fp32."""

    def __init__(
        self, workers: LocalRanks, hf: Any, folder: Path, encoding: Any = "xor", family: str = "qwen3", **sizes: int
    ) -> None:
        self.workers, self.layout = workers, TrainerLayout(2, **sizes or {"tp": 2})
        self.folder, self.local = folder / "versions", str(folder / "local")
        source, self.hf = hf(family, True)
        workers.start(config_of(source, lr=1e-6), self.layout)
        workers.run(make_writer, DiskOptions(str(self.folder), str(source), True, encoding, "xxh3-128", 20_000))

    def train(self) -> None:
        self.workers.train(Samples().shards(self.layout.dp))

    def write(self, version: int, is_full: bool = False) -> dict[str, Any]:
        first, second = self.workers.run(write, version, is_full)
        assert first == second
        return first

    def pull(self, version: int, is_full: bool = False) -> dict[str, Any]:
        """Write a version that the host takes over."""
        written = self.write(version, is_full)
        self.assert_holds(pull_version(written["folder"], self.local))
        return written

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(x).bfloat16() for name, x in self.workers.run(weights)[0].items()}

    def assert_holds(self, folder: str | None) -> None:
        """Every bit, by safetensors' own reader."""
        assert folder is not None
        found = {name: x for path in Path(folder).glob("*.safetensors") for name, x in load_file(path).items()}
        expected = self.weights()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


Make = Callable[..., Trained]


@pytest.fixture
def trained(workers: LocalRanks, hf: Callable[..., Any], tmp_path: Path) -> Iterator[Make]:
    yield partial(Trained, workers, hf, tmp_path)
    for rank in (0, 1):
        workers.run(limit_files, rank, resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    "options",
    [{"pp": 2, "encoding": "overwrite"}, {"tp": 2}, {"ep": 2, "family": "qwen3_moe"}],
    ids=["pp2", "tp2", "ep2"],
)
def test_versions_follow_the_trainers(trained: Make, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    run = trained(**options)
    full = run.pull(0)
    assert full["density"] == 1.0
    assert len(list(Path(full["folder"]).glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(f"{run.local}/weights", dtype=torch.bfloat16)
    for name, parameter in run.hf.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.bfloat16()), name

    for version in (1, 2):
        before = run.weights()
        run.train()
        after, written = run.weights(), run.pull(version)
        changed = sum(int((after[name] != before[name]).sum()) for name in after)
        assert written["density"] == changed / sum(tensor.numel() for tensor in after.values())
        assert 0 < written["density"] < 0.1
        assert 0 < written["bytes"] < full["bytes"] / 4
        run.assert_holds(pull_version(written["folder"], run.local))  # as another engine of this host does
    unchanged = run.pull(2)  # the same weights again, for an engine that has started anew
    assert (unchanged["density"], unchanged["bytes"]) == (0.0, 0)

    (run.folder / "weight_v000007").mkdir()  # of an attempt of the run that was killed
    run.workers.run(drop, 2)
    assert os.listdir(run.folder) == ["weight_v000002"]
    run.workers.run(drop, None)
    assert os.listdir(run.folder) == []


def test_config_json_has_the_type_of_the_model_not_of_tensors_in_fp32(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = DiskOptions(str(tmp_path / "versions"), str(tmp_path), False, "xor", "xxh3-128", 1)  # a file a tensor
    types = {"weight": torch.bfloat16, "A_log": torch.float32}
    tensors = [(name, torch.zeros(2, dtype=dtype)) for name, dtype in types.items()]
    for order in (tensors, tensors[::-1]):
        written = DiskWriter(options, rank=0, world_size=1, export=lambda order=order: iter(order)).write(1)
        assert json.loads(Path(written["folder"], "config.json").read_text())["dtype"] == "bfloat16"


def test_a_host_that_missed_a_version_takes_a_full_one(trained: Make, tmp_path: Path) -> None:
    run, other = trained(), str(tmp_path / "other")
    run.pull(0)
    for version in (1, 2):
        run.train()
        delta = run.write(version)
    for host in (run.local, other):  # which has nothing at all
        assert pull_version(delta["folder"], host) is None
    assert run.pull(2, is_full=True)["bytes"] > 4 * delta["bytes"]
    run.train()
    assert pull_version(run.pull(3)["folder"], other) is None


def test_versions_of_another_run_are_no_base(trained: Make) -> None:
    """Its numbers may be the same; a folder that was left behind is taken over."""
    for _ in range(2):
        run = trained()
        full = run.write(0)
        run.train()
        assert pull_version(run.write(1)["folder"], run.local) is None
        run.pull(1, is_full=True)
    assert Manifest.read(full["folder"]).version == 0


def test_many_engines_of_a_host_change_its_copy_once(trained: Make) -> None:
    """An xor that is applied twice would undo itself."""
    run = trained()
    run.pull(0)
    run.train()
    folder = run.write(1)["folder"]
    with ThreadPoolExecutor(6) as pool:
        copies = set(pool.map(lambda _: pull_version(folder, run.local), range(6)))
    assert copies == {f"{run.local}/weights"}
    run.assert_holds(copies.pop())


@pytest.mark.parametrize("is_delta", [False, True], ids=["full", "delta"])
def test_a_full_disk_under_one_rank(trained: Make, is_delta: bool) -> None:
    run = trained()
    if is_delta:
        run.pull(0)
    there = sorted(os.listdir(run.folder)) if is_delta else []
    run.train()
    run.workers.run(limit_files, 1, 100)
    with pytest.raises(Failed, match=r"trainer rank 1 .*--update-weight-disk-dir.*File too large") as failure:
        run.write(1)
    assert failure.value.kind == "OSError"
    assert sorted(os.listdir(run.folder)) == there
    run.workers.run(limit_files, 1, resource.RLIM_INFINITY)
    assert run.pull(1)["density"] == 1.0, "some tensors of the base are new and some old"


def test_a_folder_that_cannot_be_made(trained: Make) -> None:
    run = trained()
    run.folder.write_text("a file")
    with pytest.raises(Failed, match=re.escape(f"trainer rank 0 could not write the weights into {run.folder}")):
        run.write(0)


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_a_file_that_fails_while_it_is_read_is_damaged() -> None:
    """As network storage fails: the file opens, and a read raises. A full version then takes its place."""
    with pytest.raises(DamagedVersion, match="cannot be read .*Input/output error"):
        _check_file(Path("/proc/self/mem"), "", "xxh3-128")  # nothing is mapped at address 0


@pytest.mark.parametrize("damage", [spoil, _cut, Path.unlink])
def test_damage_on_the_way(trained: Make, damage: Callable[[Path], Any]) -> None:
    """A full version is refused by name, with or without a copy; in place of a delta a full version is asked for."""
    run = trained()
    folder = Path(run.write(0)["folder"])
    victim = sorted(folder.glob("*.safetensors"))[1]
    whole = victim.read_bytes()
    damage(victim)
    for place in (None, run.local):
        with pytest.raises(RuntimeError, match=victim.name) as failure:
            pull_version(str(folder), place)
        assert isinstance(failure.value, DamagedVersion) or damage is Path.unlink
    victim.write_bytes(whole)
    run.assert_holds(pull_version(str(folder), run.local))

    run.train()
    folder = Path(run.write(1)["folder"])
    damage(sorted(folder.glob("*.safetensors"))[1])
    copy = [(path, path.read_bytes()) for path in Path(run.local, "weights").iterdir()]
    assert pull_version(str(folder), run.local) is None
    assert [(path, path.read_bytes()) for path in Path(run.local, "weights").iterdir()] == copy
    run.pull(1, is_full=True)
    (folder / "manifest.json").unlink()
    with pytest.raises(RuntimeError, match=r"is not a complete version.*--update-weight-disk-dir.*nodes.*see"):
        pull_version(str(folder), run.local)


def test_a_copy_that_somebody_has_changed(trained: Make) -> None:
    """The tensors' own checksums find it; that copy is no base for anything."""
    run = trained()
    run.pull(0)
    for path in Path(run.local, "weights").glob("*.safetensors"):
        spoil(path)
    for version in (1, 2):
        run.train()
        assert pull_version(run.write(version)["folder"], run.local) is None
    run.pull(2, is_full=True)


def test_a_full_disk_of_a_host(trained: Make) -> None:
    run = trained()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = run.write(0)["folder"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(RuntimeError, match=r"local.*--update-weight-local-checkpoint-dir.*too large"):
            pull_version(folder, run.local)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.assert_holds(pull_version(folder, run.local))
