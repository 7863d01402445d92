"""`Saver`: when a checkpoint is due, how it is written, and how --resume loads it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from fusionrl.config.config import Config
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.runtime.checkpoints import Checkpoint, Checkpoints
from fusionrl.runtime.ray_cluster import gather
from fusionrl.runtime.run_actors import Actors


class StateHashes(TypedDict):
    """SHA-256 of what a checkpoint restores; of each trainer a hash for each of its states."""

    buffer: str
    trainers: list[dict[str, str]]


@dataclass
class _Pending:
    rollout_id: int
    folder: Path
    facts: dict[str, object]


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
        self._checkpoints, self._newest, self._say = checkpoints, last_saved, say  # one that failed is not tried again
        self._pending: _Pending | None = None

    def save_if_due(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Every --save-interval steps, and after the last one. What --async-save began is published when written."""
        interval = self._config.checkpoint.save_interval
        is_last = rollout_id + 1 == self._plan.num_rollout
        self.finish(wait=False)
        if is_last or (interval is not None and (rollout_id + 1) % interval == 0):
            self.save(rollout_id, metrics)

    def save(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Publish a checkpoint that contains the training of `rollout_id`; with --async-save, begin to.

        metrics: of that step, for the manifest.
        """
        options, trainers = self._config.checkpoint, self._actors.trainers
        if not self._is_new(rollout_id):
            return
        self.finish()
        self._newest = rollout_id
        self._say("saving a checkpoint")
        facts: dict[str, object] = {"mode": self._config.run.mode, "world_size": len(trainers), "metrics": metrics}
        with phase("save", step=rollout_id + 1):
            if options.verify_checkpoints:
                facts["hashes"] = state_hashes(self._actors, rollout_id)
            start = time.perf_counter()
            folder = self._checkpoints.begin(rollout_id)
            with self._checkpoints.discarding(folder):
                # When this returns, training may continue; the files are complete after `finish_save`.
                gather([self._actors.buffer.save(folder, rollout_id), *trainers.begin_save(folder, rollout_id)])
        self._pending = _Pending(rollout_id, folder, facts | {"seconds_stopped": time.perf_counter() - start})
        if not options.async_save:
            self.finish()

    def is_behind(self, rollout_id: int) -> bool:
        """Return whether `rollout_id` is to be saved, or the checkpoint that is being written to be published."""
        return self._is_new(rollout_id) or self._pending is not None

    def _is_new(self, rollout_id: int) -> bool:
        return not self._config.checkpoint.no_save and rollout_id >= 0 and rollout_id != self._newest

    def finish(self, wait: bool = True) -> None:
        """Publish the checkpoint that is being written, if any; without `wait` only if its files are there."""
        if self._pending is None or not (wait or self._actors.trainers.is_saved()):
            return
        pending, options = self._pending, self._config.checkpoint
        self._pending = None
        with phase("publish checkpoint", step=pending.rollout_id + 1), self._checkpoints.discarding(pending.folder):
            self._actors.trainers.finish_save()
            self._checkpoints.publish(pending.rollout_id, pending.folder, pending.facts)
        if options.keep_checkpoints is not None:
            with phase("publish checkpoint", step=pending.rollout_id + 1):
                self._checkpoints.prune(options.keep_checkpoints, options.keep_best)


def state_hashes(actors: Actors, rollout_id: int | None = None) -> StateHashes:
    """SHA-256 of the Buffer's state, of now or right after a rollout, and of each trainer's weights, optimizer and RNG
    states."""
    return {"buffer": actors.buffer.state_hash(rollout_id), "trainers": actors.trainers.state_hashes()}


def load_checkpoint(config: Config, actors: Actors, checkpoint: Checkpoint) -> None:
    """Restore the data cursor and the trainers. Raises ValueError if it does not fit this run; with
    --verify-checkpoints also if what was loaded is not what was saved."""
    path = checkpoint.path
    _, *restored = gather([actors.buffer.load(path), *actors.trainers.load(path)])
    if config.checkpoint.verify_checkpoints:
        same_layout = all(facts["rng_restored"] for facts in restored)
        loaded: StateHashes = {
            "buffer": actors.buffer.state_hash(),
            "trainers": [facts["hashes"] for facts in restored],
        }
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
