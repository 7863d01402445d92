"""The advantages of one rank's shard: whole samples' spread over their tokens, or token by token from log-probs."""

import functools

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.algorithms.divergence import reverse_kl_gap
from fusionrl.algorithms.sequences import Responses
from fusionrl.algorithms.stages import TokenInputs, TokenOptions, leave_one_out
from fusionrl.algorithms.token_advantages import moments, whiten
from fusionrl.config.config import Config
from fusionrl.config.groups.algorithm import AlgorithmGroup
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.train_batch import TrainShard
from fusionrl.trainer.process_groups import gathered


def needs_log_probs(algorithm: AlgorithmGroup) -> bool:
    """Return whether the trainers' log-probs go into the advantages."""
    return algorithm.kl_coef > 0 or algorithm.use_opd


def is_whitened(algorithm: AlgorithmGroup) -> bool:
    """Return whether the advantages are whitened over the rollout."""
    return estimator_of(algorithm).is_whitened or algorithm.normalize_advantages


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
    options = TokenOptions(
        gamma=algorithm.gamma,
        lambd=algorithm.lambd,
        bootstraps=algorithm.bootstrap_truncated,
        kl_coef=algorithm.kl_coef,
        kl_type=algorithm.kl_coef_type,
        process_coef=config.prm.prm_process_coef,
        outcome_coef=config.prm.prm_outcome_coef,
    )
    stage = estimator_of(algorithm).tokens
    computed = stage(TokenInputs(columns["rewards"], responses, columns, options, mean_of_others))
    advantages = computed.advantages
    if computed.returns is not None:
        shard.fields["returns"] = computed.returns.float().numpy()
    sums = torch.zeros(5, dtype=torch.float64)  # tokens, KL, excluded; KL to the teacher, excluded
    sums[0] = float((mask != 0).sum())
    if computed.kl is not None:
        sums[1:3] = computed.kl
    if is_whitened(algorithm):
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
