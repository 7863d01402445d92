"""Every checkpoint of `checkpoint_mutations` is loaded as it was or refused: no code runs, nothing waits."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer.data_source import PromptSource
from fusionrl.plan.layout import TrainerLayout
from fusionrl.runtime.checkpoints import Checkpoints
from tests.trainer.checkpoint_mutations import MARKER, MUTATIONS, forge
from tests.trainer.trainer_worker import Failed, LocalRanks, Samples, config_of

LIMIT_S = 5.0


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
    folder, _ = hf("llama", True)
    layout = TrainerLayout(2)
    os.environ[MARKER] = str(base / "marker")
    try:
        workers.start(config_of(folder), layout)
        workers.run(_set_marker, os.environ[MARKER])
        workers.train(Samples(6, seed=0).shards(2, 2), layout, 0)
        checkpoints = Checkpoints(base / "checkpoints")
        temporary = checkpoints.begin(1)
        workers.call("save", str(temporary / "trainer"), 1)
        source = _source(base / "prompts.jsonl", tiny_model)
        source.save(temporary / "buffer.json", 1)
        checkpoints.publish(1, temporary, {"metrics": {}})
        yield Saved(base / "checkpoints", workers.call("state_hashes"), workers, source)
    finally:
        os.environ.pop(MARKER)


def _source(prompts: Path, model: Path) -> PromptSource:
    """The part of a Buffer that writes and reads the data cursor."""
    from fusionrl.buffer.data_source import RolloutDataSourceWithBuffer
    from fusionrl.config.config import Config

    config = Config.from_flat({"prompt_data": [str(prompts)], "rollout_shuffle": True, "hf_checkpoint": str(model)})
    source = PromptSource(config)
    source.hooked = RolloutDataSourceWithBuffer(config.to_args())
    source.hooked.add_samples(source.hooked.get_samples(1))
    source.keep(1)
    return source


def _resume(saved: Saved, folder: Path) -> str | None:
    """What a resume does with the checkpoint, in its order. The message by which it refuses, None where it loads."""
    try:
        latest = Checkpoints(folder).latest()
        assert latest is not None
        Checkpoints.check(latest)
        saved.workers.call("load", str(latest.path / "trainer"))
        saved.source.load(latest.path / "buffer.json")
    except ValueError as error:
        return str(error)
    except Failed as error:
        if error.kind != "ValueError":
            raise
        return error.message
    return None


def _outcome(saved: Saved, name: str, folder: Path) -> str:
    """Mutate a copy in `folder` and resume from it: "identical", or the message."""
    mutation = MUTATIONS[name]
    shutil.copytree(saved.folder, folder / "checkpoints")
    step = folder / "checkpoints" / saved.folder.joinpath("step_000002").name
    mutation.mutate(step)
    if mutation.forged:
        forge(step)
    start = time.monotonic()
    message = _resume(saved, folder / "checkpoints")
    took = time.monotonic() - start
    assert took < LIMIT_S, f"{took:.1f} s"
    assert not Path(os.environ[MARKER]).exists(), "the checkpoint ran a program"
    if message is None:
        return "identical" if saved.workers.call("state_hashes") == saved.hashes else "changed"
    return message


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_loaded_as_it_was_or_refused(saved: Saved, name: str, tmp_path: Path) -> None:
    outcome = _outcome(saved, name, tmp_path)
    if MUTATIONS[name].result == "identical":
        assert outcome == "identical"
        return
    assert outcome not in ("identical", "changed"), "it was loaded"
    assert "\n" not in outcome and "Traceback" not in outcome and len(outcome) < 1200, outcome
    assert str(tmp_path) in outcome or "resume from another one" in outcome, outcome


def test_the_marker_marks(saved: Saved, tmp_path: Path) -> None:
    """The pickles of the mutations do run under a plain unpickler; else the test above shows nothing."""
    import pickle

    from tests.trainer.checkpoint_mutations import Runs

    marker = Path(os.environ[MARKER])
    pickle.loads(pickle.dumps(Runs()))
    assert marker.exists()
    marker.unlink()
    saved.workers.run(_unpickle_there, pickle.dumps(Runs()))
    assert marker.exists()
    marker.unlink()


def _set_marker(actor: Any, path: str) -> None:
    os.environ[MARKER] = path


def _unpickle_there(actor: Any, data: bytes) -> None:
    import pickle

    pickle.loads(data)


def test_an_unmodified_checkpoint_is_identical(saved: Saved) -> None:
    assert _resume(saved, saved.folder) is None
    assert saved.workers.call("state_hashes") == saved.hashes
