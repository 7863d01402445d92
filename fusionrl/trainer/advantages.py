"""Stage 3, advantages: of whole samples spread over their tokens, or token by token from log-probs.

Losses that look at a whole optimizer step before it (`look_ahead`: which tokens are held back, and the pairs of DPO)
need the policy's log-probs of all samples of the step over all ranks; their result is a column of the shard, so that
no split over ranks and micro-batches changes it.
"""

import functools
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.algorithms.covariance import select
from fusionrl.algorithms.divergence import reverse_kl_gap
from fusionrl.algorithms.dpo import pair_slopes
from fusionrl.algorithms.estimators import LOSSES
from fusionrl.algorithms.sequences import Responses
from fusionrl.algorithms.stages import TokenInputs, TokenOptions, leave_one_out
from fusionrl.algorithms.token_advantages import moments, whiten
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.config.scopes import flags_as
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.trainer.loss import LossOptions
from fusionrl.trainer.process_groups import gathered
from fusionrl.trainer.score import Scorer, score_samples
from fusionrl.trainer.shards import Experts

METRICS = """
train/kl | nats | Estimate of KL(policy || reference) by --kl-coef-type before the first optimizer step, mean over
    tokens; --kl-coef times it is subtracted from the rewards. | --kl-coef above 0
train/kl_excluded | tokens | Tokens left out of train/kl because a log-prob is -inf or NaN. | --kl-coef above 0
train/opd_kl | nats | Mean over tokens of log p(policy) - log p(teacher), before the first optimizer step: an estimate
    of KL(policy || teacher). | --use-opd
train/opd_excluded | tokens | Tokens left out of train/opd_kl because a log-prob is -inf or NaN. | --use-opd
"""


def add_advantages(shard: TrainShard, config: Config, device: torch.device) -> dict[str, float]:
    """Set the shard's `advantages`, and with a critic its `returns`. A collective of the data-parallel ranks.

    Returns metrics over all ranks, without prefix: kl (policy to reference, where it is a price), opd_kl (policy to
    teacher), and the number of tokens left out of either because a log-prob was not finite. Raises ValueError for
    rewards, values or log-probs that no advantage can be computed from.
    """
    kinds = (np.float32, np.bool_)
    columns = {name: torch.from_numpy(array) for name, array in shard.fields.items() if array.dtype in kinds}
    mask = columns["loss_mask"]
    responses = Responses(mask, torch.from_numpy(shard.response_lengths.astype(np.int64)))
    mean_of_others = functools.partial(_mean_of_others, shard)
    algorithm = config.algorithm
    options = flags_as(TokenOptions, algorithm, config.prm)
    stage = estimator_of(algorithm).tokens
    computed = stage(TokenInputs(columns["rewards"], responses, columns, options, mean_of_others))
    advantages = computed.advantages
    if computed.returns is not None:
        shard.fields["returns"] = computed.returns.float().numpy()
    sums = torch.zeros(5, dtype=torch.float64)  # tokens, KL, excluded; KL to the teacher, excluded
    sums[0] = float((mask != 0).sum())
    if computed.kl is not None:
        sums[1:3] = computed.kl
    if estimator_of(algorithm).is_whitened or algorithm.normalize_advantages:
        advantages = whiten(advantages, mask, _added_up(moments(advantages, mask), device))
    if algorithm.use_opd:
        if "teacher_log_probs" not in columns:
            raise ValueError(
                "--use-opd: samples of this rollout have no teacher_log_probs; let a function set them for every sample"
                " that trains, or give --opd-teacher-load"
            )
        to_teacher, excluded = reverse_kl_gap(columns["log_probs"], columns["teacher_log_probs"], mask)
        advantages = advantages + algorithm.opd_kl_coef * to_teacher
        sums[3:5] = torch.stack([-to_teacher.double().sum(), excluded.double()])
    shard.fields["advantages"] = advantages.float().numpy()
    tokens, kl, kl_excluded, gap, gap_excluded = _added_up(sums, device).tolist()
    metrics: dict[str, float] = {}
    if algorithm.kl_coef > 0:
        metrics |= {"kl": kl / max(tokens, 1.0), "kl_excluded": kl_excluded}
    if algorithm.use_opd:
        metrics |= {"opd_kl": gap / max(tokens, 1.0), "opd_excluded": gap_excluded}
    return metrics


def _mean_of_others(shard: TrainShard, values: Tensor) -> Tensor:
    """The mean of the other samples' `values` [n] in each sample's group, wherever these are -> [n]."""
    group = shard.fields["group_index"]
    group = np.where(group < 0, -1 - shard.fields["position"], group)  # of no group: alone
    everywhere = gathered((values.numpy(), group), parallel_state.get_data_parallel_group())
    means = leave_one_out(*(np.concatenate(parts) for parts in zip(*everywhere, strict=True)))
    first = sum(len(part[0]) for part in everywhere[: parallel_state.get_data_parallel_rank()])
    return torch.from_numpy(means[first : first + len(values)])


def _added_up(values: Tensor, device: torch.device) -> Tensor:
    """The sum over data-parallel ranks; context-parallel ones have the same whole samples."""
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return values
    values = values.to(device)
    dist.all_reduce(values, group=group)
    return values.cpu()


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
