"""Losses that look at a whole mini-batch before its step: which tokens are held back, and the pairs of DPO.

Each needs the log-probs of the policy as it is before the optimizer step, of all samples of the step over all ranks;
its result is a column of the shard, so that no split over ranks and micro-batches changes it.
"""

from dataclasses import replace

import numpy as np
from megatron.core import parallel_state

from fusionrl.algorithms.covariance import select
from fusionrl.algorithms.dpo import pair_slopes
from fusionrl.algorithms.estimators import LOSSES
from fusionrl.config.config import Config
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.trainer.loss import LossOptions
from fusionrl.trainer.process_groups import gathered
from fusionrl.trainer.score import Scorer, score_samples
from fusionrl.trainer.stages import Experts


def look_ahead(
    shard: TrainShard, index: int, experts: Experts, config: Config, loss: LossOptions, scorer: Scorer, num_before: int
) -> dict[str, float]:
    """Set the column that the loss needs for step `index`, by the weights before it; return metrics. A collective.

    `num_before`: optimizer steps of the run before this one; with --seed they seed the choice of tokens. A loss that
    neither chooses tokens nor compares the samples of a pair needs nothing.
    """
    is_dpo = loss.policy_loss == "dpo"
    if loss.mode != "rl" or not (is_dpo or LOSSES[loss.policy_loss].selects):
        return {}
    step = shard.steps[index]
    if index == 0 and "log_probs" in shard.fields:
        log_probs = shard.fields["log_probs"]
    else:
        alone = replace(shard, steps=[step])
        log_probs = score_samples(alone, scorer, planned_only=True, routing="fixed", experts=experts).flat
    if is_dpo:
        return pair_advantages(shard, step, log_probs, config.algorithm.dpo_beta, config.algorithm.dpo_label_smoothing)
    select_tokens(shard, step, log_probs, loss, config.run.seed + num_before)
    return {}


def select_tokens(shard: TrainShard, step: TrainStep, log_probs: np.ndarray, options: LossOptions, seed: int) -> None:
    """Set `selected` of the step's samples, for clip_cov and kl_cov; `log_probs` [response tokens] before the step."""
    constants = options.constants
    chosen = np.zeros(shard.num_samples, bool)
    chosen[[i for group in step.micro_batches for i in group]] = True
    here = np.repeat(chosen, shard.response_lengths)
    old = shard.fields.get("rollout_log_probs" if options.use_rollout_log_probs else "log_probs", log_probs)
    advantages = shard.fields["advantages"]
    ratio = np.exp(np.clip(log_probs - old, -20.0, 20.0))
    clipped = np.where(advantages > 0, ratio > 1 + constants.eps_high, ratio < 1 - constants.eps_low) & (
        advantages != 0
    )
    starts = np.repeat(np.cumsum(shard.response_lengths) - shard.response_lengths, shard.response_lengths)
    columns = {
        "log_probs": log_probs,
        "advantages": advantages,
        "mask": shard.fields["loss_mask"],
        "sample_index": np.repeat(shard.fields["sample_index"], shard.response_lengths),
        "position": np.arange(len(starts)) - starts,
        "clipped": clipped,
    }
    ranks = parallel_state.get_data_parallel_group()
    everywhere = gathered({name: column[here] for name, column in columns.items()}, ranks)
    columns_everywhere = {name: np.concatenate([part[name] for part in everywhere]) for name in columns}
    selected = select(options.policy_loss, **columns_everywhere, seed=seed, options=constants)
    first = sum(len(part["mask"]) for part in everywhere[: ranks.rank()])
    column = shard.fields.get("selected", np.zeros(len(starts), np.float32)).copy()
    column[here] = selected[first : first + int(here.sum())]
    shard.fields["selected"] = column


def pair_advantages(
    shard: TrainShard, step: TrainStep, log_probs: np.ndarray, beta: float, label_smoothing: float
) -> dict[str, float]:
    """DPO: set the advantages with which a policy gradient of the step's samples is the gradient of DPO's loss.

    A sample's sign (+1 chosen, -1 rejected) is its reward, and its pair its group. With h the log ratio of the chosen
    less that of the rejected, before the step, the loss's derivative by a log-prob of the chosen is
    `-beta ((1 - e) sigmoid(-beta h) - e sigmoid(beta h))`, and of the rejected its opposite. The weights `constant` 1
    divide by the number of samples; hence the factor samples / pairs for the mean over pairs. So a pair need not stand
    in one micro-batch, nor on one rank. A pair with an answer without a trained token counts nothing.

    Returns the metrics of `pair_slopes`; `pairs_excluded` counts pairs with such an answer, or with a log-prob that is
    not finite.
    """
    gaps = np.where(shard.fields["loss_mask"] > 0, log_probs - shard.fields["ref_log_probs"], 0.0)
    parts = np.split(gaps.astype(np.float64), np.cumsum(shard.response_lengths)[:-1])
    members = [i for group in step.micro_batches for i in group]
    groups, signs = shard.fields["group_index"], shard.fields["rewards"]
    trained = {i for i, mask in enumerate(shard.split("loss_mask")[: shard.num_samples]) if mask.any()}
    members_trained = [(int(groups[i]), float(signs[i]), float(parts[i].sum())) for i in members if i in trained]
    ranks = parallel_state.get_data_parallel_group()
    slopes, metrics = pair_slopes(
        (entry for part in gathered(members_trained, ranks) for entry in part), beta, label_smoothing
    )
    column = shard.fields["advantages"].copy()
    ends = np.cumsum(shard.response_lengths)
    for i in members:
        scale = step.num_samples / max(len(slopes), 1)
        column[ends[i] - shard.response_lengths[i] : ends[i]] = -scale * slopes.get(int(groups[i]), 0.0) * signs[i]
    shard.fields["advantages"] = column
    return metrics
