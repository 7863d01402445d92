"""Checkpoints that are damaged, or that somebody prepared: each is loaded as it was, or refused in one line.

`mutate(step)` changes the checkpoint in the folder `step`. With `forged` the hashes are made anew afterwards, as
somebody would who wants the change to be read; without, they are those of the save.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionrl.base.file_hashes import facts_of

MARKER = "FUSIONRL_TEST_MARKER"


class Runs:
    """Its pickle touches the file that `MARKER` names, if it is loaded by a plain unpickler."""

    def __reduce__(self) -> Any:
        return os.system, (f'touch "${MARKER}"',)


@dataclass(frozen=True)
class Mutation:
    """A change, and what becomes of the checkpoint: "refused" or "identical"."""

    mutate: Callable[[Path], Any]
    forged: bool = False
    result: str = "refused"


def _json(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def mutate(step: Path) -> None:
        data = json.loads((step / name).read_text())
        changed = change(data)
        (step / name).write_text(json.dumps(data if changed is None else changed))

    return mutate


def _set(*keys: str, to: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[int(key) if isinstance(data, list) else key]
        data[keys[-1]] = to

    return change


def _drop(*keys: str) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda step: (step / name).write_bytes(content) and None


def _largest(step: Path) -> Path:
    return max((step / "trainer").glob("*.distcp"), key=lambda path: path.stat().st_size)


def _flip_bit(step: Path) -> None:
    data = bytearray(_largest(step).read_bytes())
    data[len(data) // 2] ^= 1
    _largest(step).write_bytes(data)


def _moved_link(name: str) -> Callable[[Path], None]:
    """The real file elsewhere, and a link to it."""

    def mutate(step: Path) -> None:
        elsewhere = step.parent.parent / "elsewhere"
        elsewhere.mkdir()
        (step / name).rename(elsewhere / "moved")
        (step / name).symlink_to(elsewhere / "moved")

    return mutate


def _fifo(name: str) -> Callable[[Path], None]:
    def mutate(step: Path) -> None:
        (step / name).unlink()
        os.mkfifo(step / name)

    return mutate


def _metadata(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def mutate(step: Path) -> None:
        path = step / "trainer" / ".metadata"
        data = pickle.loads(path.read_bytes())
        changed = change(data)
        path.write_bytes(pickle.dumps(data if changed is None else changed))

    return mutate


def _places(**changes: Any) -> Callable[[Path], None]:
    """Other values in where every shard stands."""
    import dataclasses

    def change(metadata: Any) -> None:
        metadata.storage_data = {
            index: dataclasses.replace(place, **changes) for index, place in metadata.storage_data.items()
        }

    return _metadata(change)


def _other_shapes(metadata: Any) -> None:
    import dataclasses

    import torch

    name, held = next((name, held) for name, held in metadata.state_dict_metadata.items() if hasattr(held, "size"))
    metadata.state_dict_metadata[name] = dataclasses.replace(held, size=torch.Size([7] * len(held.size)))


def _objects_run_code(step: Path) -> None:
    """Each object among the shards (random number generators, extra states) becomes a pickle that runs a program."""
    import dataclasses

    path = step / "trainer" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    evil = io.BytesIO()
    import torch

    torch.save(Runs(), evil)
    for index, place in list(metadata.storage_data.items()):
        if not hasattr(metadata.state_dict_metadata[index.fqn], "size"):
            file = step / "trainer" / place.relative_path
            metadata.storage_data[index] = dataclasses.replace(
                place, offset=file.stat().st_size, length=len(evil.getvalue())
            )
            with file.open("ab") as out:
                out.write(evil.getvalue())
    path.write_bytes(pickle.dumps(metadata))


def _common_shard(trainer: Path) -> Any:
    """What Megatron-core 0.19 writes among the shards, and reads from common.pt if there is one."""
    import torch

    metadata = pickle.loads((trainer / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn.startswith("common_state/"))
    with (trainer / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return torch.load(io.BytesIO(file.read(place.length)), weights_only=True)[0]


def _common(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change common.pt; where Megatron-core writes none, put one there."""

    def mutate(step: Path) -> None:
        import torch

        path = step / "trainer" / "common.pt"
        data = torch.load(path, weights_only=True) if path.exists() else _common_shard(step / "trainer")
        changed = change(data)
        torch.save(data if changed is None else changed, path)

    return mutate


def _sparse(name: str) -> Callable[[Path], None]:
    def mutate(step: Path) -> None:
        with (step / name).open("r+b") as file:
            file.truncate(1 << 40)

    return mutate


def _rewrite_json(step: Path) -> None:
    for name in ("buffer.json", "manifest.json"):
        (step / name).write_text(json.dumps(json.loads((step / name).read_text()), indent=7))


def _other_rights(step: Path) -> None:
    for path in step.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (0, 0))


def _without_hashes_in_manifest(step: Path) -> None:
    for key in ("format", "files", "folders"):
        _json("manifest.json", _drop(key))(step)


def _as_before_hashes(step: Path) -> None:
    """The checkpoint that the version before hashes would have written."""
    _without_hashes_in_manifest(step)
    _json("trainer/fusionrl.json", _drop("files"))(step)
    _json("trainer/fusionrl.json", _set("format", to=1))(step)


def _as_before_hashes_with(mutate: Callable[[Path], Any]) -> Callable[[Path], None]:
    def both(step: Path) -> None:
        _as_before_hashes(step)
        mutate(step)

    return both


NESTED = b"[" * 200_000
OBJECT_ARRAY = {"$array": ["|O", [1], "AAAAAAAAAAA="]}
FACT, UNKNOWN = [1, "sha256:00"], [9, "x:0"]

MUTATIONS: dict[str, Mutation] = {
    # what the manifest says
    "manifest: cut off": Mutation(_write("manifest.json", b'{"rollout_id": 1, "fi')),
    "manifest: a list": Mutation(_write("manifest.json", b"[]")),
    "manifest: nested 200,000 deep": Mutation(_write("manifest.json", NESTED)),
    "manifest: a terabyte": Mutation(_sparse("manifest.json")),
    "manifest: a link": Mutation(_moved_link("manifest.json")),
    "manifest: another rollout": Mutation(_json("manifest.json", _set("rollout_id", to=99))),
    "manifest: a rollout of text": Mutation(_json("manifest.json", _set("rollout_id", to="1; rm -r /"))),
    "manifest: metrics that are a list": Mutation(_json("manifest.json", _set("metrics", to=[1]))),
    "manifest: no hashes": Mutation(_json("manifest.json", _drop("files"))),
    "manifest: no hashes of the trainers": Mutation(_json("manifest.json", _set("folders", "trainer", to={}))),
    "manifest: no hashes, and no format": Mutation(_without_hashes_in_manifest),
    "manifest: a hash of an unknown kind": Mutation(_json("manifest.json", _set("files", "buffer.json", to=UNKNOWN))),
    "manifest: a file above the folder": Mutation(_json("manifest.json", _set("files", "../../secret", to=FACT))),
    "manifest: a folder above the folder": Mutation(
        _json("manifest.json", _set("folders", "../step_000009", to={"a": FACT}))
    ),
    # files that are not what was saved
    "buffer.json: missing": Mutation(lambda step: (step / "buffer.json").unlink()),
    "buffer.json: changed": Mutation(_json("buffer.json", _set("source", "num_samples", to=0))),
    "buffer.json: a link": Mutation(_moved_link("buffer.json")),
    "buffer.json: a pipe": Mutation(_fifo("buffer.json")),
    "trainer: missing": Mutation(lambda step: shutil.rmtree(step / "trainer")),
    "trainer: a link": Mutation(_moved_link("trainer")),
    "trainer: a shard is missing": Mutation(lambda step: _largest(step).unlink()),
    "trainer: a bit of a shard is another": Mutation(_flip_bit),
    "trainer: a shard is cut off": Mutation(lambda step: os.truncate(_largest(step), 1000)),
    "trainer: another common.pt": Mutation(_common(_set("scheduler", "num_steps", to=99))),
    # the same with hashes that fit
    "forged .metadata: runs a program": Mutation(_write("trainer/.metadata", pickle.dumps(Runs())), True),
    "forged .metadata: a program among what is allowed": Mutation(
        _metadata(lambda metadata: setattr(metadata, "planner_data", Runs())), True
    ),
    "forged .metadata: cut off": Mutation(lambda step: os.truncate(step / "trainer" / ".metadata", 500), True),
    "forged .metadata: a bytes object of 8 exabytes": Mutation(
        _write("trainer/.metadata", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f."), True
    ),
    "forged .metadata: shards above the folder": Mutation(_places(relative_path="../../../elsewhere/x"), True),
    "forged .metadata: shards behind the end": Mutation(_places(offset=1 << 40), True),
    "forged shards: objects that run a program": Mutation(_objects_run_code, True),
    "forged common.pt: runs a program": Mutation(_common(lambda data: Runs()), True),
    "forged common.pt: no archive": Mutation(_write("trainer/common.pt", b"no archive"), True),
    "forged common.pt: no schedule": Mutation(_common(_drop("scheduler")), True),
    "forged metadata.json: another backend": Mutation(
        _json("trainer/metadata.json", _set("sharded_backend", to="zarr")), True
    ),
    "forged metadata.json: no JSON": Mutation(_write("trainer/metadata.json", b"{"), True),
    "forged fusionrl.json: counters of text": Mutation(
        _json("trainer/fusionrl.json", _set("counters", "skipped", to="0")), True
    ),
    "forged fusionrl.json: no counters": Mutation(_json("trainer/fusionrl.json", _drop("counters")), True),
    "forged fusionrl.json: no layout": Mutation(_json("trainer/fusionrl.json", _drop("layout")), True),
    "forged fusionrl.json: another model": Mutation(
        _json("trainer/fusionrl.json", _set("shape", "hidden_size", to=4096)), True
    ),
    "forged fusionrl.json: of a later format": Mutation(_json("trainer/fusionrl.json", _set("format", to=3)), True),
    "forged fusionrl.json: of the format without hashes": Mutation(
        _json("trainer/fusionrl.json", _set("format", to=1)), True
    ),
    "forged buffer.json: a cursor of text": Mutation(
        _json("buffer.json", _set("source", "sets", "0", "num_drawn", to="1")), True
    ),
    "forged buffer.json: no sets": Mutation(_json("buffer.json", _drop("source", "sets")), True),
    "forged buffer.json: samples of numbers": Mutation(_json("buffer.json", _set("source", "buffer", to=[[1]])), True),
    "forged buffer.json: an array of objects": Mutation(
        _json("buffer.json", _set("source", "metadata", to={"a": OBJECT_ARRAY})), True
    ),
    "forged buffer.json: nested 200,000 deep": Mutation(_write("buffer.json", NESTED), True),
    "forged buffer.json: a rollout of text": Mutation(_json("buffer.json", _set("rollout_id", to="1")), True),
    # of the version before hashes
    "format before hashes: as it was": Mutation(_as_before_hashes, result="identical"),
    "format before hashes: .metadata runs a program": Mutation(
        _as_before_hashes_with(_write("trainer/.metadata", pickle.dumps(Runs())))
    ),
    "format before hashes: objects that run a program": Mutation(_as_before_hashes_with(_objects_run_code)),
    "format before hashes: common.pt runs a program": Mutation(_as_before_hashes_with(_common(lambda data: Runs()))),
    "format before hashes: buffer.json is a pipe": Mutation(_as_before_hashes_with(_fifo("buffer.json"))),
    "format before hashes: a shard is missing": Mutation(_as_before_hashes_with(lambda step: _largest(step).unlink())),
    # what changes nothing
    "forged .metadata: a shape that no shard has": Mutation(_metadata(_other_shapes), True, result="identical"),
    "a pickle that no manifest names": Mutation(_write("trainer/x.pt", pickle.dumps(Runs())), result="identical"),
    "other rights and times": Mutation(_other_rights, result="identical"),
    "JSON written in another way": Mutation(_rewrite_json, True, result="identical"),
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
