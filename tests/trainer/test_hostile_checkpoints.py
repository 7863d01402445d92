"""Damaged and prepared checkpoints are loaded as they were or refused in one line: no code runs, nothing waits."""

import dataclasses
import io
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from fusionrl.base.files import facts_of
from fusionrl.buffer.data_source import PromptSource, RolloutDataSourceWithBuffer
from fusionrl.config.config import Config
from fusionrl.plan.layout import TrainerLayout
from fusionrl.runtime.checkpoints import Checkpoints
from fusionrl.trainer.safe_load import read_metadata
from tests.trainer.trainer_worker import Failed, LocalRanks, Samples, config_of

LIMIT_S = 5.0
MARKER = "FUSIONRL_TEST_MARKER"
Mutate = Callable[[Path], Any]


class Runs:
    """Its pickle touches the file that `MARKER` names, if it is loaded by a plain unpickler."""

    def __reduce__(self) -> Any:
        return os.system, (f'touch "${MARKER}"',)


@dataclass(frozen=True)
class Mutation:
    """`mutate` changes the checkpoint in a folder, which is refused then, or as it was.

    With `is_forged` the hashes are made anew afterwards, as somebody would who wants the change to be read.
    """

    mutate: Mutate
    is_forged: bool = False
    is_identical: bool = False


# --- JSON ---
def _json(name: str, change: Callable[[Any], Any]) -> Mutate:
    def mutate(step: Path) -> None:
        change(data := json.loads((step / name).read_text()))
        (step / name).write_text(json.dumps(data))

    return mutate


def _at(data: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys[:-1]:
        data = data[key]
    return data


def _set(name: str, *keys: str | int, to: Any) -> Mutate:
    return _json(name, lambda data: _at(data, keys).update({keys[-1]: to}))


def _drop(name: str, *keys: str) -> Mutate:
    return _json(name, lambda data: _at(data, keys).pop(keys[-1]))


# --- files ---
def _write(name: str, content: bytes) -> Mutate:
    return lambda step: (step / name).write_bytes(content)


def _largest(step: Path) -> Path:
    return max((step / "trainer").glob("*.distcp"), key=lambda path: path.stat().st_size)


def _flip_bit(step: Path) -> None:
    data = bytearray(_largest(step).read_bytes())
    data[len(data) // 2] ^= 1
    _largest(step).write_bytes(data)


def _moved_link(name: str) -> Mutate:
    """The real file elsewhere, and a link to it."""

    def mutate(step: Path) -> None:
        elsewhere = step.parent.parent / "elsewhere"
        elsewhere.mkdir()
        (step / name).rename(elsewhere / "moved")
        (step / name).symlink_to(elsewhere / "moved")

    return mutate


def _pipe(step: Path) -> None:
    (step / "buffer.json").unlink()
    os.mkfifo(step / "buffer.json")


def _rewrite_json(step: Path) -> None:
    for name in ("buffer.json", "manifest.json"):
        (step / name).write_text(json.dumps(json.loads((step / name).read_text()), indent=7))


def _other_rights(step: Path) -> None:
    for path in step.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (0, 0))


# --- torch's and Megatron's ---
def _metadata(change: Callable[[Any], Any]) -> Mutate:
    def mutate(step: Path) -> None:
        path = step / "trainer" / ".metadata"
        change(data := pickle.loads(path.read_bytes()))
        path.write_bytes(pickle.dumps(data))

    return mutate


def _places(**changes: Any) -> Mutate:
    """Other values in where every shard stands."""

    def change(metadata: Any) -> None:
        places = metadata.storage_data
        places |= {index: dataclasses.replace(place, **changes) for index, place in places.items()}

    return _metadata(change)


def _other_shapes(metadata: Any) -> None:
    name, held = next((name, held) for name, held in metadata.state_dict_metadata.items() if hasattr(held, "size"))
    metadata.state_dict_metadata[name] = dataclasses.replace(held, size=torch.Size([7] * len(held.size)))


def _objects_run_code(step: Path) -> None:
    """Each object among the shards (random number generators, extra states) becomes a pickle that runs a program."""
    torch.save(Runs(), evil := io.BytesIO())

    def change(metadata: Any) -> None:
        for index, place in list(metadata.storage_data.items()):
            if not hasattr(metadata.state_dict_metadata[index.fqn], "size"):
                file = step / "trainer" / place.relative_path
                there = dataclasses.replace(place, offset=file.stat().st_size, length=len(evil.getvalue()))
                metadata.storage_data[index] = there
                with file.open("ab") as out:
                    out.write(evil.getvalue())

    _metadata(change)(step)


def _common_shard(trainer: Path) -> Any:
    """What Megatron-core 0.19 writes among the shards, and reads from common.pt if there is one."""
    metadata = pickle.loads((trainer / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn.startswith("common_state/"))
    with (trainer / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return torch.load(io.BytesIO(file.read(place.length)), weights_only=True)[0]


def _common(change: Callable[[Any], Any]) -> Mutate:
    """Change common.pt, or put another object there; where Megatron-core writes none, add one."""

    def mutate(step: Path) -> None:
        path = step / "trainer" / "common.pt"
        data = torch.load(path, weights_only=True) if path.exists() else _common_shard(step / "trainer")
        changed = change(data)
        torch.save(changed if isinstance(changed, Runs) else data, path)

    return mutate


def _all(*mutations: Mutate) -> Mutate:
    return lambda step: [mutate(step) for mutate in mutations]


MANIFEST, BUFFER, DESCRIPTION = "manifest.json", "buffer.json", "trainer/fusionrl.json"
NESTED = b"[" * 200_000
OBJECT_ARRAY = {"$array": ["|O", [1], "AAAAAAAAAAA="]}
FACT, UNKNOWN = [1, "sha256:00"], [9, "x:0"]
# Those of before hashes: the checkpoint that the version before them would have written.
_no_hashes = _all(*(_drop(MANIFEST, key) for key in ("format", "files", "folders")))
_before_hashes = _all(_no_hashes, _drop(DESCRIPTION, "files"), _set(DESCRIPTION, "format", to=1))
_metadata_runs, _common_runs = _write("trainer/.metadata", pickle.dumps(Runs())), _common(lambda data: Runs())

DAMAGED: dict[str, Mutate] = {
    # what the manifest says
    "manifest: cut off": _write(MANIFEST, b'{"rollout_id": 1, "fi'),
    "manifest: nested 200,000 deep": _write(MANIFEST, NESTED),
    "manifest: a terabyte": lambda step: os.truncate(step / MANIFEST, 1 << 40),
    "manifest: a link": _moved_link(MANIFEST),
    "manifest: another rollout": _set(MANIFEST, "rollout_id", to=99),
    "manifest: a rollout of text": _set(MANIFEST, "rollout_id", to="1; rm -r /"),
    "manifest: metrics that are a list": _set(MANIFEST, "metrics", to=[1]),
    "manifest: no hashes": _drop(MANIFEST, "files"),
    "manifest: no hashes of the trainers": _set(MANIFEST, "folders", "trainer", to={}),
    "manifest: no hashes, and no format": _no_hashes,
    "manifest: a hash of an unknown kind": _set(MANIFEST, "files", "buffer.json", to=UNKNOWN),
    "manifest: a file above the folder": _set(MANIFEST, "files", "../../secret", to=FACT),
    "manifest: a folder above the folder": _set(MANIFEST, "folders", "../step_000009", to={"a": FACT}),
    # files that are not what was saved
    "buffer.json: missing": lambda step: (step / BUFFER).unlink(),
    "buffer.json: changed": _set(BUFFER, "source", "num_samples", to=0),
    "buffer.json: a link": _moved_link(BUFFER),
    "buffer.json: a pipe": _pipe,
    "trainer: missing": lambda step: shutil.rmtree(step / "trainer"),
    "trainer: a link": _moved_link("trainer"),
    "trainer: a shard is missing": lambda step: _largest(step).unlink(),
    "trainer: a bit of a shard is another": _flip_bit,
    "trainer: a shard is cut off": lambda step: os.truncate(_largest(step), 1000),
    "trainer: another common.pt": _common(lambda data: data["scheduler"].update(num_steps=99)),
    "format before hashes: .metadata runs a program": _all(_before_hashes, _metadata_runs),
    "format before hashes: objects that run a program": _all(_before_hashes, _objects_run_code),
    "format before hashes: common.pt runs a program": _all(_before_hashes, _common_runs),
    "format before hashes: buffer.json is a pipe": _all(_before_hashes, _pipe),
    "format before hashes: a shard is missing": _all(_before_hashes, lambda step: _largest(step).unlink()),
}
# With hashes that fit.
FORGED: dict[str, Mutate] = {
    ".metadata: runs a program": _metadata_runs,
    ".metadata: a program among what is allowed": _metadata(lambda data: setattr(data, "planner_data", Runs())),
    ".metadata: cut off": lambda step: os.truncate(step / "trainer" / ".metadata", 500),
    ".metadata: 8 exabytes": _write("trainer/.metadata", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f."),
    ".metadata: shards above the folder": _places(relative_path="../../../elsewhere/x"),
    ".metadata: shards behind the end": _places(offset=1 << 40),
    "shards: objects that run a program": _objects_run_code,
    "common.pt: runs a program": _common_runs,
    "common.pt: no archive": _write("trainer/common.pt", b"no archive"),
    "common.pt: no schedule": _common(lambda data: data.pop("scheduler")),
    "metadata.json: another backend": _set("trainer/metadata.json", "sharded_backend", to="zarr"),
    "metadata.json: no JSON": _write("trainer/metadata.json", b"{"),
    "fusionrl.json: counters of text": _set(DESCRIPTION, "counters", "skipped", to="0"),
    "fusionrl.json: no layout": _drop(DESCRIPTION, "layout"),
    "fusionrl.json: another model": _set(DESCRIPTION, "shape", "hidden_size", to=4096),
    "fusionrl.json: of a later format": _set(DESCRIPTION, "format", to=3),
    "fusionrl.json: of the format without hashes": _set(DESCRIPTION, "format", to=1),
    "buffer.json: a cursor of text": _set(BUFFER, "source", "sets", 0, "num_drawn", to="1"),
    "buffer.json: no sets": _drop(BUFFER, "source", "sets"),
    "buffer.json: samples of numbers": _set(BUFFER, "source", "buffer", to=[[1]]),
    "buffer.json: an array of objects": _set(BUFFER, "source", "metadata", to={"a": OBJECT_ARRAY}),
    "buffer.json: nested 200,000 deep": _write(BUFFER, NESTED),
    "buffer.json: a rollout of text": _set(BUFFER, "rollout_id", to="1"),
}
MUTATIONS = {name: Mutation(mutate) for name, mutate in DAMAGED.items()}
MUTATIONS |= {f"forged {name}": Mutation(mutate, is_forged=True) for name, mutate in FORGED.items()}
MUTATIONS |= {
    "nothing": Mutation(lambda step: None, is_identical=True),
    "format before hashes: as it was": Mutation(_before_hashes, is_identical=True),
    "forged .metadata: a shape that no shard has": Mutation(_metadata(_other_shapes), True, is_identical=True),
    "a pickle that no manifest names": Mutation(_write("trainer/x.pt", pickle.dumps(Runs())), is_identical=True),
    "other rights and times": Mutation(_other_rights, is_identical=True),
    "JSON written in another way": Mutation(_rewrite_json, True, is_identical=True),
}


def forge(step: Path) -> None:
    """Make the hashes those of the files as they are."""
    trainer, manifest = step / "trainer", json.loads((step / "manifest.json").read_text())
    if (trainer / "fusionrl.json").is_file():
        description = json.loads((trainer / "fusionrl.json").read_text())
        names = [path.name for path in trainer.iterdir() if path.name != "fusionrl.json"]
        description["files"] = facts_of(trainer, names)
        (trainer / "fusionrl.json").write_text(json.dumps(description))
        manifest["folders"] = {"trainer": facts_of(trainer, ["fusionrl.json"])}
    manifest["files"] = facts_of(step, ["buffer.json"])
    (step / "manifest.json").write_text(json.dumps(manifest))


@dataclass
class Saved:
    """A run's checkpoints, and the hashes of what it holds."""

    folder: Path
    hashes: list[dict[str, str]]
    workers: LocalRanks
    source: PromptSource


@pytest.fixture(scope="module")
def saved(workers: LocalRanks, hf: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """One checkpoint of two data-parallel ranks, with a data cursor."""
    base = tmp_path_factory.mktemp("run")
    (base / "prompts.jsonl").write_text('{"input": "a"}\n{"input": "b"}\n')
    prompts = {"prompt_data": [str(base / "prompts.jsonl")], "rollout_shuffle": True}
    config = Config.from_flat(prompts | {"hf_checkpoint": str(tiny_model)})
    source = PromptSource(config)
    source.hooked = RolloutDataSourceWithBuffer(config.to_args())
    source.hooked.add_samples(source.hooked.get_samples(1))
    source.keep(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARKER, str(base / "marker"))
        workers.start(config_of(hf("llama", True)[0]), TrainerLayout(2))
        workers.run(_set_marker, os.environ[MARKER])
        workers.train(Samples(6, seed=0).shards(2, 2))
        checkpoints = Checkpoints(base / "checkpoints")
        temporary = checkpoints.begin(1)
        workers.call("save", str(temporary / "trainer"), 1)
        source.save(temporary / "buffer.json", 1)
        checkpoints.publish(1, temporary, {"metrics": {}})
        yield Saved(base / "checkpoints", workers.call("state_hashes"), workers, source)


def _resume(saved: Saved, folder: Path) -> str | None:
    """What a resume does with the checkpoint, in its order. The message by which it refuses, None where it loads."""
    try:
        latest = Checkpoints(folder).latest()
        assert latest is not None
        Checkpoints.check(latest)
        saved.workers.call("load", str(latest.path / "trainer"))
        saved.source.load(latest.path / "buffer.json")
    except (ValueError, Failed) as error:
        if isinstance(error, Failed) and error.kind != "ValueError":
            raise
        return getattr(error, "message", str(error))
    return None


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_loaded_as_it_was_or_refused(saved: Saved, name: str, tmp_path: Path) -> None:
    mutation, copy = MUTATIONS[name], tmp_path / "checkpoints"
    shutil.copytree(saved.folder, copy)
    mutation.mutate(copy / "step_000002")
    if mutation.is_forged:
        forge(copy / "step_000002")
    start = time.monotonic()
    message = _resume(saved, copy)
    assert time.monotonic() - start < LIMIT_S
    assert not Path(os.environ[MARKER]).exists(), "the checkpoint ran a program"
    if mutation.is_identical:
        assert message is None and saved.workers.call("state_hashes") == saved.hashes
        return
    assert message is not None, "it was loaded"
    assert "\n" not in message and "Traceback" not in message and len(message) < 1200, message
    assert str(tmp_path) in message or "resume from another one" in message, message


def test_the_marker_marks(saved: Saved) -> None:
    """The pickles of the mutations do run under a plain unpickler; else the test above shows nothing."""
    marker, data = Path(os.environ[MARKER]), pickle.dumps(Runs())
    for unpickle in (pickle.loads, lambda data: saved.workers.run(_unpickle_there, data)):
        unpickle(data)
        marker.unlink()


def _set_marker(actor: Any, path: str) -> None:
    os.environ[MARKER] = path


def _unpickle_there(actor: Any, data: bytes) -> None:
    pickle.loads(data)


# --- .metadata of torch's own checkpoints ---
@pytest.mark.parametrize("kind", [str, Path])
def test_what_torch_writes_is_read(kind: type[str] | type[Path], tmp_path: Path) -> None:
    folder = tmp_path / "saved"  # whichever way it is given
    torch.distributed.checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=kind(folder), no_dist=True)
    with (folder / ".metadata").open("rb") as file:
        metadata = read_metadata(file)
    assert list(metadata.state_dict_metadata) == ["weight"]
    assert metadata.storage_meta is not None and str(metadata.storage_meta.checkpoint_id) == str(folder)


def test_a_path_of_python_3_13_is_read(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    text = pickle.dumps(metadata, protocol=2)
    assert b"cpathlib\n" in text
    assert read_metadata(io.BytesIO(text.replace(b"cpathlib\n", b"cpathlib._local\n"))) == metadata


def test_other_names_of_pathlib_are_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"pathlib\.os"):
        read_metadata(io.BytesIO(b"cpathlib\nos\n."))
