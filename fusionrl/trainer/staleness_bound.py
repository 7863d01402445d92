"""The bound on staleness where it counts: at the optimizer, for each sample and each token that is trained on.

The Buffer checks it before it hands a batch over. Functions of a user's run after that check, and so does everything
that cuts and packs; nothing runs between this check and the step.
"""

import numpy as np

from fusionrl.config.hooks import HookError
from fusionrl.data.sampling import UNKNOWN_VERSION
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.pipeline.knobs import Knobs


def check_staleness(shard: TrainShard, step: TrainStep, rollout_id: int, knobs: Knobs) -> None:
    """Hold the trained tokens of an optimizer step of rollout `rollout_id` to --max-staleness.

    Engines call their weights by the number of rollouts that had trained them; `fetches_per_push` of these make one
    version. Tokens of an unknown version pass; the Buffer counts them (`rollout/staleness/unknown`). Raises HookError,
    which names the first sample that is too old, its prompt, the token and its version.
    """
    if "weight_versions" not in shard.fields:
        return
    newest = rollout_id // knobs.fetches_per_push
    versions, masks = shard.split("weight_versions"), shard.split("loss_mask")
    for place in sorted(i for group in step.micro_batches for i in group):
        sampled = versions[place]
        counts = (masks[place] > 0) & (sampled != UNKNOWN_VERSION)
        ages = newest - sampled // knobs.fetches_per_push
        bad = np.flatnonzero(counts & (ages > knobs.max_staleness))
        if bad.size:
            token = int(bad[np.argmax(ages[bad])])
            sample, prompt = (int(shard.fields[name][place]) for name in ("sample_index", "group_index"))
            error = HookError(
                f"--max-staleness {knobs.max_staleness}: sample {sample} of prompt {prompt} has token {token} of its"
                f" response from version {sampled[token]}, and rollout {rollout_id} would train it, {ages[token]}"
                " versions later; a function that runs after the batch was taken must not bring older tokens, nor"
                " change weight_versions"
            )
            error.positions = [place]
            raise error
