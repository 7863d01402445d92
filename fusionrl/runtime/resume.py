"""--resume: a checkpoint is loaded into the actors; `resume_checks` has found it."""

from __future__ import annotations

from fusionrl.config.config import Config
from fusionrl.runtime.checkpoints import Checkpoint
from fusionrl.runtime.ray_cluster import gather
from fusionrl.runtime.run_actors import Actors
from fusionrl.runtime.saver import StateHashes


def load_checkpoint(config: Config, actors: Actors, checkpoint: Checkpoint) -> None:
    """Restore the data cursor and the trainers.

    Raises:
        ValueError: it does not fit this run; with --verify-checkpoints also if what was loaded is not what was saved.
    """
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
        raise ValueError(f"--verify-checkpoints: the hashes in the manifest of {checkpoint.path} are no JSON object")
    wrong = ["the data cursor"] if saved["buffer"] != loaded["buffer"] else []
    if same_layout:
        for rank, (before, after) in enumerate(zip(saved["trainers"], loaded["trainers"], strict=True)):
            wrong += [f"{name} of trainer {rank}" for name in before if before[name] != after[name]]
    if wrong:
        raise ValueError(
            f"--verify-checkpoints: {checkpoint.path} was loaded, but {', '.join(wrong)} is not what was saved; "
            "its files have changed: delete that folder and resume from the one before it"
        )
