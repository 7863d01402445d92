"""Versions of the weights as files: what two ranks write, what a host makes of it, and what becomes of damage."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fusionrl.engines.local_copy import DamagedVersion, Manifest, _check_file, pull_version
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


@dataclass
class Trained:
    """A model of two ranks that can be trained, written and looked at. Engines' weights are bf16, trainers' fp32."""

    workers: LocalRanks
    layout: TrainerLayout
    folder: Path
    options: DiskOptions
    hf: Any

    def train(self) -> None:
        self.workers.train(Samples().shards(self.layout.dp), self.layout)

    def write(self, version: int, is_full: bool = False) -> dict[str, Any]:
        first, second = self.workers.run(write, version, is_full)
        assert first == second
        return first

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


@pytest.fixture
def trained(workers: LocalRanks, hf: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Trained]]:
    def make(
        layout: TrainerLayout | None = None, encoding: Any = "xor", keeps_base: bool = True, family: str = "qwen3"
    ) -> Trained:
        layout = layout or TrainerLayout(2, tp=2)
        source, model = hf(family, True)
        options = DiskOptions(str(tmp_path / "versions"), str(source), keeps_base, encoding, "xxh3-128", 20_000)
        workers.start(config_of(source, lr=1e-6), layout)
        workers.run(make_writer, options)
        return Trained(workers, layout, Path(options.folder), options, model)

    yield make
    workers.run(limit_files, 0, resource.RLIM_INFINITY)
    workers.run(limit_files, 1, resource.RLIM_INFINITY)


@contextmanager
def small_files(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("layout", "encoding", "family"),
    [
        (TrainerLayout(2, pp=2), "overwrite", "qwen3"),
        (TrainerLayout(2, tp=2), "xor", "qwen3"),
        (TrainerLayout(2, ep=2), "xor", "qwen3_moe"),
    ],
    ids=["pp2", "tp2", "ep2"],
)
def test_versions_follow_the_trainers(
    trained: Callable[..., Trained], layout: TrainerLayout, encoding: str, family: str, tmp_path: Path
) -> None:
    """Bit by bit; with the share that changed as brute force counts it: a few per cent, at RL's learning rates."""
    from transformers import AutoModelForCausalLM

    run, local = trained(layout, encoding, family=family), str(tmp_path / "local")
    full = run.write(0)
    assert full["density"] == 1.0
    assert len(list(Path(full["folder"]).glob("*.safetensors"))) > 2
    copy = pull_version(full["folder"], local)
    run.assert_holds(copy)
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16)
    for name, parameter in run.hf.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.bfloat16()), name

    for version in (1, 2):
        before = run.weights()
        run.train()
        after, written = run.weights(), run.write(version)
        changed = sum(int((after[name] != before[name]).sum()) for name in after)
        assert written["density"] == changed / sum(tensor.numel() for tensor in after.values())
        assert 0 < written["density"] < 0.1
        assert 0 < written["bytes"] < full["bytes"] / 4
        assert pull_version(written["folder"], local) == copy
        assert pull_version(written["folder"], local) == copy  # as another engine of this host does
        run.assert_holds(copy)
    unchanged = run.write(2)  # the same weights again, for an engine that has started anew
    assert (unchanged["density"], unchanged["bytes"]) == (0.0, 0)
    run.assert_holds(pull_version(unchanged["folder"], local))

    (run.folder / "weight_v000007").mkdir()  # of an attempt of the run that was killed
    run.workers.run(drop, 2)
    assert os.listdir(run.folder) == ["weight_v000002"]
    run.workers.run(drop, None)
    assert os.listdir(run.folder) == []


def test_full_versions_keep_no_base(trained: Callable[..., Trained]) -> None:
    run = trained(keeps_base=False)
    for version in (0, 1):
        written = run.write(version)
        assert written["density"] == 1.0
        assert pull_version(written["folder"], None) == written["folder"]
        run.assert_holds(written["folder"])
        run.train()


def test_a_host_that_missed_a_version_takes_a_full_one(trained: Callable[..., Trained], tmp_path: Path) -> None:
    run, (one, other) = trained(), (str(tmp_path / name) for name in ("one", "other"))
    pull_version(run.write(0)["folder"], one)
    for version in (1, 2):
        run.train()
        delta = run.write(version)
    assert pull_version(delta["folder"], one) is None
    assert pull_version(delta["folder"], other) is None  # nothing there at all
    full = run.write(2, is_full=True)
    assert full["bytes"] > 4 * delta["bytes"]
    run.assert_holds(pull_version(full["folder"], one))
    run.train()
    delta = run.write(3)
    run.assert_holds(pull_version(delta["folder"], one))
    assert pull_version(delta["folder"], other) is None


def test_versions_of_another_run_are_no_base(trained: Callable[..., Trained], tmp_path: Path) -> None:
    """Its numbers may be the same; a folder that was left behind is taken over."""
    local = str(tmp_path / "local")
    for _ in range(2):
        run = trained()
        full = run.write(0)
        run.train()
        delta = run.write(1)
        assert pull_version(delta["folder"], local) is None
        run.assert_holds(pull_version(run.write(1, is_full=True)["folder"], local))
    assert Manifest.read(full["folder"]).version == 0


def test_many_engines_of_a_host_change_its_copy_once(trained: Callable[..., Trained], tmp_path: Path) -> None:
    """An xor that is applied twice would undo itself."""
    run, local = trained(), str(tmp_path / "local")
    pull_version(run.write(0)["folder"], local)
    run.train()
    folder = run.write(1)["folder"]
    with ThreadPoolExecutor(6) as pool:
        copies = list(pool.map(lambda _: pull_version(folder, local), range(6)))
    assert set(copies) == {f"{local}/weights"}
    run.assert_holds(copies[0])


@pytest.mark.parametrize("is_delta", [False, True], ids=["full", "delta"])
def test_a_full_disk_under_one_rank(trained: Callable[..., Trained], tmp_path: Path, is_delta: bool) -> None:
    run, local = trained(), str(tmp_path / "local")
    if is_delta:
        pull_version(run.write(0)["folder"], local)
    there = sorted(os.listdir(run.folder)) if is_delta else []
    run.train()
    run.workers.run(limit_files, 1, 100)
    with pytest.raises(Failed, match=r"trainer rank 1 .*--update-weight-disk-dir.*File too large") as failure:
        run.write(1)
    assert failure.value.kind == "OSError"
    assert sorted(os.listdir(run.folder)) == there
    run.workers.run(limit_files, 1, resource.RLIM_INFINITY)
    written = run.write(1)
    assert written["density"] == 1.0, "some tensors of the base are new and some old"
    run.assert_holds(pull_version(written["folder"], local))


def test_a_folder_that_cannot_be_made(trained: Callable[..., Trained]) -> None:
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
def test_damage_on_the_way(trained: Callable[..., Trained], tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    """A full version is refused by name, with or without a copy; in place of a delta a full version is asked for."""
    run, local = trained(), str(tmp_path / "local")
    folder = Path(run.write(0)["folder"])
    victim = sorted(folder.glob("*.safetensors"))[1]
    whole = victim.read_bytes()
    damage(victim)
    for place in (None, local):
        with pytest.raises(RuntimeError, match=victim.name) as failure:
            pull_version(str(folder), place)
        assert isinstance(failure.value, DamagedVersion) or damage is Path.unlink
    victim.write_bytes(whole)
    run.assert_holds(pull_version(str(folder), local))

    before = {path.name: path.read_bytes() for path in Path(local, "weights").iterdir()}
    run.train()
    folder = Path(run.write(1)["folder"])
    damage(sorted(folder.glob("*.safetensors"))[1])
    assert pull_version(str(folder), local) is None
    assert {path.name: path.read_bytes() for path in Path(local, "weights").iterdir()} == before
    run.assert_holds(pull_version(run.write(1, is_full=True)["folder"], local))
    (folder / "manifest.json").unlink()
    with pytest.raises(RuntimeError, match=r"is not a complete version.*--update-weight-disk-dir.*nodes.*see"):
        pull_version(str(folder), local)


def test_a_copy_that_somebody_has_changed(trained: Callable[..., Trained], tmp_path: Path) -> None:
    """The tensors' own checksums find it; that copy is no base for anything."""
    run, local = trained(), str(tmp_path / "local")
    copy = pull_version(run.write(0)["folder"], local)
    assert copy is not None
    for path in Path(copy).glob("*.safetensors"):
        spoil(path)
    for version in (1, 2):
        run.train()
        assert pull_version(run.write(version)["folder"], local) is None
    run.assert_holds(pull_version(run.write(2, is_full=True)["folder"], local))


def test_a_full_disk_of_a_host(trained: Callable[..., Trained], tmp_path: Path) -> None:
    run, local = trained(), str(tmp_path / "local")
    folder = run.write(0)["folder"]
    with (
        small_files(1000),
        pytest.raises(RuntimeError, match=r"local.*--update-weight-local-checkpoint-dir.*too large"),
    ):
        pull_version(folder, local)
    run.assert_holds(pull_version(folder, local))
    shutil.rmtree(local)
    run.assert_holds(pull_version(folder, local))
