"""Checkpoints in a run's folder: written under a temporary name and published by one rename; checked before a resume.

`fusionrl plan` and `train` check what needs no process of the run; trainers and Buffer check the same when they load.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from fusionrl.base.files import check_facts, facts_of, flush, plain_name, rename_flushed
from fusionrl.base.imports import quiet
from fusionrl.config.config import Config
from fusionrl.config.run_parts import changes_weights, has_own_source, saves
from fusionrl.data.sample_json import SourceState
from fusionrl.models.shape import ModelShape, shape_difference
from fusionrl.models.trainable import Adapted, adapted_difference, saved_in
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.plan.trained_parts import adapted_of, adapter_folders, has_several_adapters
from fusionrl.weights.remote_calls import gather, get

if TYPE_CHECKING:
    from fusionrl.runtime.buffer_calls import PendingCall
    from fusionrl.runtime.run_actors import Actors

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d{6,})")
_MANIFEST, _BUFFER = "manifest.json", "buffer.json"
_WRITING = ".writing_"
_DESCRIPTIONS = ("fusionrl.json",)  # of a trainer's folder: it has the hashes of the other files, made when written
_MAX_MANIFEST_BYTES = 64 * 2**20
_FORMAT, _WITHOUT_HASHES = 2, 1  # of a trainer's description, and of manifests; manifests of format 1 have no "format"


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint: its folder, the last rollout whose training it contains, and its manifest."""

    path: Path
    rollout_id: int
    manifest: dict[str, object] = field(default_factory=dict)


def _read(path: Path) -> Checkpoint:
    """The checkpoint in `path`, with its manifest. Raises ValueError if it is damaged, or of another checkpoint."""
    where = f"checkpoint {path}: it is damaged or incomplete"
    if path.is_symlink() or (path / _MANIFEST).is_symlink():
        raise ValueError(f"{where}: it is a link to elsewhere")
    try:
        if (path / _MANIFEST).stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError("it is too large")
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {_MANIFEST} cannot be read ({str(error)[:200]})") from error
    saved = manifest.get("rollout_id") if isinstance(manifest, dict) else None
    if type(saved) is not int or path.name != f"step_{saved + 1:06d}":
        raise ValueError(
            f"{where}: {_MANIFEST} has rollout_id {str(saved)[:40]!r}, which does not belong to {path.name}"
        )
    if not isinstance(manifest.get("metrics", {}), dict):
        raise ValueError(f"{where}: the metrics in {_MANIFEST} are not a JSON object")
    return Checkpoint(path, saved, manifest)


def _contents(folder: Path) -> dict[str, object]:
    """Sizes and hashes: of the folder's files, and of those of its subfolders.

    Of a trainer's subfolder its description alone, which has those of the other files; a subfolder without files is
    left out.
    """
    facts = {path.name: facts_of(path, _hashed_here(path)) for path in folder.iterdir() if path.is_dir()}
    return {
        "files": facts_of(folder, [path.name for path in folder.iterdir() if path.is_file()]),
        "folders": {name: of_folder for name, of_folder in facts.items() if of_folder},
    }


def _hashed_here(folder: Path) -> list[str]:
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return [name for name in names if name in _DESCRIPTIONS] or names


def _is_without_hashes(checkpoint: Checkpoint) -> bool:
    """Tell whether manifest and trainers have the format before hashes, and all is plain files and folders."""
    if checkpoint.manifest.keys() & {"format", "files", "folders"}:
        return False
    subfolders = [path for path in checkpoint.path.iterdir() if path.is_dir()]
    with ExitStack() as stack:
        entries = [entry for path in (checkpoint.path, *subfolders) for entry in stack.enter_context(os.scandir(path))]
    if not all(entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) for entry in entries):
        return False
    descriptions = [path / name for path in subfolders for name in _DESCRIPTIONS if (path / name).is_file()]
    return all(_format_of(path) == _WITHOUT_HASHES for path in descriptions)


def _format_of(description: Path) -> object:
    try:
        content = json.loads(description.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("format") if isinstance(content, dict) else None


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def latest(self) -> Checkpoint | None:
        """The newest finished checkpoint by its name; one without its manifest was never published and does not count.
        Raises ValueError if its manifest is damaged, or of another checkpoint; older ones are not read."""
        finished = self.finished()
        if not finished:
            return None
        try:
            return _read(finished[0])
        except ValueError as error:
            before = f" to resume from {finished[1].name}" if len(finished) > 1 else ""
            raise ValueError(f"{error}; move {finished[0].name} out of {self.folder}{before}") from error

    def finished(self) -> list[Path]:
        """The folders of all checkpoints that were published, the newest by its name first."""
        names = {path: match for path in self.folder.glob("step_*") if (match := _NAME.fullmatch(path.name))}
        published = [path for path in names if os.path.isfile(path / _MANIFEST)]
        return sorted(published, key=lambda path: int(names[path][1]), reverse=True)

    @staticmethod
    def check(checkpoint: Checkpoint) -> None:
        """Compare a checkpoint with its manifest, except the trainers' files, which the trainers check.

        One of an earlier version, which kept no hashes, is let through with a warning. Raises ValueError if a file or
        folder is missing, is not what was saved, or is a link to elsewhere.
        """
        where = f"checkpoint {checkpoint.path}: it is damaged or incomplete"
        if _is_without_hashes(checkpoint):
            logger.warning(
                "checkpoint %s: an earlier version wrote it, without hashes, so damage to its files may go unseen",
                checkpoint.path,
            )
            return
        check_facts(checkpoint.path, checkpoint.manifest.get("files"), where)
        folders = checkpoint.manifest.get("folders")
        if not isinstance(folders, dict):
            raise ValueError(f"{where}: its manifest names no folders")
        for name, facts in folders.items():
            folder = checkpoint.path / plain_name(name, where)
            if folder.is_symlink() or not folder.is_dir():
                raise ValueError(f"{where}: {name} is missing, or a link")
            check_facts(folder, facts, f"{where}, in {name}")

    def prune(self, keep: int, best_by: str | None = None) -> list[Path]:
        """Delete all but the newest `keep` checkpoints, and the one whose manifest has the highest `best_by`.

        `best_by` names one of the manifest's `metrics`; a checkpoint without it is not best. Of equal ones the newer
        counts. Returns what was deleted. A checkpoint loses its manifest first, so that a kill on the way leaves none
        that looks complete. One whose manifest is damaged or of another checkpoint is not counted and not deleted.
        """
        candidates: list[tuple[int, float | None, Path]] = []
        for path in reversed(self.finished()):
            try:
                checkpoint = _read(path)
            except ValueError as error:
                logger.warning("--keep-checkpoints leaves alone: %s", error)
                continue
            metrics = checkpoint.manifest.get("metrics")
            metric = metrics.get(best_by) if best_by and isinstance(metrics, dict) else None
            candidates.append((checkpoint.rollout_id, metric if isinstance(metric, int | float) else None, path))
        with_metric = [entry for entry in candidates if entry[1] is not None]
        best = max(with_metric, key=lambda entry: (entry[1], entry[0]), default=None)
        deleted = [entry[2] for entry in candidates[:-keep] if entry is not best]
        for path in deleted:
            (path / _MANIFEST).unlink()
            shutil.rmtree(path)
        return deleted

    def begin(self, rollout_id: int) -> Path:
        """An empty folder that is to become the checkpoint of `rollout_id`; unfinished ones of earlier attempts go."""
        for left in self.folder.glob(f"{_WRITING}*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = self.folder / f"{_WRITING}step_{rollout_id + 1:06d}"
        temporary.mkdir(parents=True)
        return temporary

    def publish(self, rollout_id: int, temporary: Path, facts: Mapping[str, object]) -> Checkpoint:
        """Add the manifest to the filled folder of `begin` and rename it to `step_<finished rollouts>`.

        A kill on the way leaves every earlier checkpoint as it was.
        """
        final = self.folder / f"step_{rollout_id + 1:06d}"
        contents = _contents(temporary)
        numbers = {"format": _FORMAT, "step": rollout_id + 1, "rollout_id": rollout_id, "time": time.time()}
        manifest = {**numbers, **facts, **contents}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        folders = [path for path in temporary.iterdir() if path.is_dir()]  # trainers have flushed what they wrote
        flush((*(path / name for path in (temporary, *folders) for name in _hashed_here(path)), *folders, temporary))
        if final.exists():  # the same step, saved again by a later attempt
            shutil.rmtree(final)
        rename_flushed(temporary, final)  # before `prune` deletes an older one
        return Checkpoint(final, rollout_id, manifest)

    @contextmanager
    def discarding(self, temporary: Path) -> Iterator[None]:
        """Within it an error deletes a folder of `begin`."""
        try:
            yield
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


class StateHashes(TypedDict):
    """SHA-256 of what a checkpoint restores; of each trainer a hash for each of its states."""

    buffer: str
    trainers: list[dict[str, str]]


@dataclass
class _Pending:
    rollout_id: int
    folder: Path
    metrics: dict[str, float] = field(default_factory=dict)
    hashes: StateHashes = field(default_factory=lambda: StateHashes(buffer="", trainers=[]))
    seconds_stopped: float = 0.0  # for which training waited


class Saver:
    """Checkpoints of the trainers and of the data cursor."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        actors: Actors,
        checkpoints: Checkpoints,
        last_saved: int,
        say: Callable[[str], None],
    ) -> None:
        """`last_saved`: rollout of the checkpoint that the run resumes from; -1: none."""
        self._config, self._plan, self._actors = config, plan, actors
        self._checkpoints, self._first, self._say = checkpoints, last_saved, say
        self._newest = last_saved  # or the next one that failed, which is not tried again
        self._begun: _Pending | None = None  # has the trainers' part, ahead of its step's end
        self._pending: _Pending | None = None
        self._owed: _Pending | None = None  # was lost before it was published
        self.published: Checkpoint | None = None
        """The newest that this attempt has published."""

    def save_if_due(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Every --save-interval steps, and after the last one. What --async-save began is published when written."""
        self.finish(wait=False)
        if self._is_due(rollout_id):
            self.save(rollout_id, metrics)

    def begin_if_due(self, rollout_id: int) -> None:
        """Take the trainers' part of what `save_if_due` will save, while engines leave the memory to them."""
        if self._is_due(rollout_id) and self._is_new(rollout_id):
            begun = self._open(rollout_id)
            with self._stopping(begun):
                self._take_trainers(begun)
            self._begun = begun

    def _is_due(self, rollout_id: int) -> bool:
        step, interval = rollout_id + 1, self._config.checkpoint.save_interval
        return step == self._plan.num_rollout or self._owed is not None or bool(interval and step % interval == 0)

    def save(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Publish a checkpoint after `rollout_id`, or begin to (--async-save). `metrics`: of its step."""
        begun, self._begun = self._begun, None
        has_trainers = begun is not None
        if begun is None:
            if not self._is_new(rollout_id):
                return
            begun = self._open(rollout_id)
        assert begun.rollout_id == rollout_id, "a step that began a checkpoint ends with it"
        with self._stopping(begun):
            # When this returns, training may continue; the files are complete after `finish_save`.
            saving = self._actors.buffer.ask("save", str(begun.folder / _BUFFER), rollout_id)
            if not has_trainers:
                self._take_trainers(begun)
            begun.hashes["buffer"] = self._finish_buffer(saving, begun.folder, rollout_id)
        begun.metrics, self._owed, self._pending = metrics, None, begun
        if not self._config.checkpoint.async_save:
            self.finish()

    def _open(self, rollout_id: int) -> _Pending:
        self.finish()
        self._newest = rollout_id
        self._say("saving a checkpoint")
        return _Pending(rollout_id, self._checkpoints.begin(rollout_id))

    @contextmanager
    def _stopping(self, begun: _Pending) -> Iterator[None]:
        """Within it training waits for the checkpoint."""
        start = time.perf_counter()
        with phase("save", step=begun.rollout_id + 1), self._checkpoints.discarding(begun.folder):
            yield
        begun.seconds_stopped += time.perf_counter() - start

    def _take_trainers(self, begun: _Pending) -> None:
        if self._config.checkpoint.verify_checkpoints:
            begun.hashes["trainers"] = self._actors.trainers.finish("state_hashes")
        method = "begin_save" if self._config.checkpoint.async_save else "save"
        self._actors.trainers.finish(method, begun.folder, begun.rollout_id)

    def _finish_buffer(self, saving: PendingCall, folder: Path, rollout_id: int) -> str:
        """Wait for the Buffer's file; return its state's hash with --verify-checkpoints. Both of one Buffer: one that
        replaces another has not the answers that a stream was waiting for."""
        buffer = self._actors.buffer
        while True:
            buffer.wait(saving)
            number = buffer.num_replaced
            of_state = str(buffer.call("state_hash", rollout_id)) if self._config.checkpoint.verify_checkpoints else ""
            if buffer.num_replaced == number:
                return of_state
            saving = buffer.ask("save", str(folder / _BUFFER), rollout_id)

    def reset(self) -> None:
        """After the trainers were ended: what they were writing is lost, and is saved at the next opportunity."""
        for lost in filter(None, (self._begun, self._pending)):
            shutil.rmtree(lost.folder, ignore_errors=True)
        self._owed = self._pending or self._owed
        self._begun = self._pending = None
        self._newest = self._first if self.published is None else self.published.rollout_id

    def is_behind(self, rollout_id: int) -> bool:
        """Return whether `rollout_id` is to be saved, or the checkpoint that is being written to be published."""
        return self._is_new(rollout_id) or self._begun is not None or self._pending is not None

    def _is_new(self, rollout_id: int) -> bool:
        return not self._config.checkpoint.no_save and rollout_id >= 0 and rollout_id != self._newest

    def finish_last(self) -> None:
        """Publish the last checkpoint; after a `reset` save it again: the trainers are back at the last step."""
        if self._owed is not None:
            self.save(self._owed.rollout_id, self._owed.metrics)
        self.finish()

    def finish(self, wait: bool = True) -> None:
        """Publish the checkpoint that is being written, if any; without `wait` only if its files are there."""
        if self._pending is None or not (wait or all(gather(self._actors.trainers.call("is_saved")))):
            return
        pending, options = self._pending, self._config.checkpoint
        self._pending, self._owed = None, self._pending
        with phase("publish checkpoint", step=pending.rollout_id + 1), self._checkpoints.discarding(pending.folder):
            gather(self._actors.trainers.call("finish_save"))
            facts: dict[str, object] = {"mode": self._config.run.mode, "world_size": len(self._actors.trainers)}
            facts |= {"metrics": pending.metrics, "seconds_stopped": pending.seconds_stopped}
            if options.verify_checkpoints:
                facts["hashes"] = pending.hashes
            self.published = self._checkpoints.publish(pending.rollout_id, pending.folder, facts)
        self._owed = None
        if options.keep_checkpoints is not None:
            with phase("publish checkpoint", step=pending.rollout_id + 1):
                self._checkpoints.prune(options.keep_checkpoints, options.keep_best)


def load_checkpoint(config: Config, actors: Actors, checkpoint: Checkpoint) -> None:
    """Restore the data cursor and the trainers. Raises ValueError if it does not fit this run; with
    --verify-checkpoints also if what was loaded is not what was saved."""
    path, buffer = checkpoint.path, actors.buffer
    loading = buffer.load(str(path / _BUFFER), checkpoint.rollout_id)
    restored = actors.trainers.finish("load", path)
    get(loading)
    if config.checkpoint.verify_checkpoints:
        same_layout = all(facts["rng_restored"] for facts in restored)
        loaded = StateHashes(
            buffer=str(buffer.call("state_hash", None)), trainers=[facts["hashes"] for facts in restored]
        )
        compare_hashes(checkpoint, loaded, same_layout=same_layout)


def compare_hashes(checkpoint: Checkpoint, loaded: StateHashes, *, same_layout: bool) -> None:
    """Raise where what was loaded is not, bit by bit, what was saved; ranks of another layout have other parts."""
    saved = checkpoint.manifest.get("hashes")
    if saved is None:
        return
    if not isinstance(saved, dict):
        raise ValueError(f"--verify-checkpoints: the hashes in the manifest of {checkpoint.path} are not a JSON object")
    wrong = ["the data cursor"] if saved["buffer"] != loaded["buffer"] else []
    if same_layout:
        for rank, (before, after) in enumerate(zip(saved["trainers"], loaded["trainers"], strict=True)):
            wrong += [f"{name} of trainer {rank}" for name in before if before[name] != after[name]]
    if wrong:
        raise ValueError(
            f"--verify-checkpoints: {checkpoint.path} was loaded, but {', '.join(wrong)} is not what was saved; "
            "its files have changed: delete that folder and resume from the one before it"
        )


MAX_CHECKED_PROMPTS = 50_000  # of larger data only the Buffer compares the prompts: reading them twice takes minutes


def find_checkpoint(config: Config, checkpoints: Checkpoints) -> Checkpoint | None:
    """The newest checkpoint of the run, checked; None: the run starts at step 0. Raises ValueError if it is damaged."""
    latest = checkpoints.latest() if config.run.resume else None
    if latest is not None:
        checkpoints.check(latest)
    return latest


def resume_errors(config: Config, plan: Plan) -> list[str]:
    """List the errors that keep the run from resuming from its newest checkpoint: damage, another model, other data."""
    if not config.run.resume or config.run.run_dir is None:
        return []
    try:
        latest = find_checkpoint(config, Checkpoints(Path(config.run.run_dir) / "checkpoints"))
    except ValueError as error:
        return [str(error)]
    return [] if latest is None else _model_errors(latest.path, config, plan) + _data_errors(latest.path, config)


def nothing_left(config: Config, plan: Plan) -> str | None:
    """Return the error of a --resume of a finished run; None if steps are left."""
    if not config.run.resume or config.run.run_dir is None:
        return None
    latest = Checkpoints(Path(config.run.run_dir) / "checkpoints").latest()
    if latest is None or not plan.num_rollout or latest.rollout_id + 1 < plan.num_rollout:
        return None
    return (
        f"nothing is left to do: {latest.path.name} is after step {latest.rollout_id + 1}, and the run ends after step"
        f" {plan.num_rollout}; raise --num-rollout (or --num-epoch) to continue"
    )


def _model_errors(path: Path, config: Config, plan: Plan) -> list[str]:
    if plan.layout is None or config.run.mode == "reject-sampling":  # whose checkpoints have no trainers
        return []
    adapted = adapted_of(config, plan.shape)
    names = tuple(adapter_folders(config)) if has_several_adapters(config) else ()
    saved = sorted(folder.name.removeprefix("trainer-") for folder in path.glob("trainer-*"))
    if saved != sorted(names):
        has = f"has the adapters {', '.join(saved)}" if saved else "has one adapter, or none"
        cure = "a resume needs the --lora-adapters of the run's start; a new run starts with NAME=FOLDER of --save-hf"
        return [f"checkpoint {path}: it {has}; {cure}"]
    folders = [f"trainer-{name}" for name in names] or ["trainer"]
    models: dict[str, tuple[ModelShape, Adapted | None]] = dict.fromkeys(folders, (plan.shape, adapted))
    if plan.auxiliary:
        models[plan.auxiliary.role] = plan.auxiliary.shape, None
    errors = []
    for name, (shape, adapters) in models.items():
        if not (path / name).is_dir():
            errors.append(f"checkpoint {path}: it has no {name}; give the --mode and the estimator of the run's start")
            continue
        try:
            description = json.loads((path / name / "fusionrl.json").read_text(encoding="utf-8"))
            difference = shape_difference(path / name, description["shape"], shape)
            difference = difference or adapted_difference(path / name, saved_in(description), adapters, shape)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # the trainers say what is wrong with it
        if difference is not None:
            errors.append(difference)
    return errors


def _data_errors(path: Path, config: Config) -> list[str]:
    """Compare the prompts with those of the checkpoint, as the Buffer does when it loads."""
    data, run = config.data, config.run
    if has_own_source(config):  # a user's code runs in the Buffer alone
        return []
    if data.prompt_data is None or run.mode == "eval" or run.load_debug_rollout_data:
        return []
    try:
        state: SourceState = json.loads((path / _BUFFER).read_text(encoding="utf-8"))["source"]
        num_prompts = sum(data_set["num_prompts"] for data_set in state["sets"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # the Buffer says what is wrong with it
    if num_prompts > MAX_CHECKED_PROMPTS:
        return []
    from fusionrl.buffer.data_source import RolloutDataSourceWithBuffer  # with a tokenizer: only for a resume

    try:
        with quiet():
            RolloutDataSourceWithBuffer(config.to_args()).load_state_dict(state)
    except ValueError as error:
        return [str(error)]
    except (OSError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return []  # as above
    return []


def saves_at_the_end_only(config: Config) -> bool:
    """Return whether a run that is killed before its end loses all of its steps."""
    options = config.checkpoint
    return saves(config) and changes_weights(config) and not options.no_save and not options.save_interval
