"""The advantages of one rank's shard: whole samples' spread over their tokens, or token by token from log-probs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.algorithms.group_stages import leave_one_out
from fusionrl.algorithms.log_ratio import reverse_kl_gap
from fusionrl.algorithms.responses import Responses
from fusionrl.algorithms.token_stages import TokenInputs, TokenOptions, TokenStage
from fusionrl.algorithms.whitening import moments, whiten
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.train_batch import TrainShard

T = TypeVar("T")


@dataclass(frozen=True)
class AdvantageOptions:
    """The part of the configuration that advantages need.

    stage      the estimator's token stage
    constants  of the token stage
    opd_coef   None: no teacher
    """

    stage: TokenStage
    constants: TokenOptions
    is_whitened: bool
    opd_coef: float | None

    @classmethod
    def from_config(cls, config: Config) -> AdvantageOptions:
        """The options of `config`."""
        algorithm, estimator = config.algorithm, estimator_of(config.algorithm)
        constants = TokenOptions(
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            bootstraps=algorithm.bootstrap_truncated,
            kl_coef=algorithm.kl_coef,
            kl_type=algorithm.kl_coef_type,
            process_coef=config.prm.prm_process_coef,
            outcome_coef=config.prm.prm_outcome_coef,
        )
        return cls(
            stage=estimator.tokens,
            constants=constants,
            is_whitened=estimator.is_whitened or algorithm.normalize_advantages,
            opd_coef=algorithm.opd_kl_coef if algorithm.use_opd else None,
        )

    @property
    def needs_log_probs(self) -> bool:
        """Return whether the trainers' log-probs go into them."""
        return self.constants.kl_coef > 0 or self.opd_coef is not None


def add_advantages(shard: TrainShard, options: AdvantageOptions, device: torch.device) -> dict[str, float]:
    """Set the shard's `advantages`, and with a critic its `returns`. A collective of the data-parallel ranks.

    Returns:
        Metrics over all ranks, without prefix: kl (policy to reference, where it is a price), opd_kl (policy to
        teacher), and the number of tokens left out of either because a log-prob was not finite.

    Raises:
        ValueError: rewards, values or log-probs that no advantage can be computed from.
    """
    kinds = (np.float32, np.bool_)
    columns = {name: torch.from_numpy(array) for name, array in shard.fields.items() if array.dtype in kinds}
    mask = columns["loss_mask"]
    responses = Responses(mask, torch.from_numpy(shard.response_lengths.astype(np.int64)))
    mean_of_others = functools.partial(_mean_of_others, shard)
    computed = options.stage(TokenInputs(columns["rewards"], responses, columns, options.constants, mean_of_others))
    advantages = computed.advantages
    if computed.returns is not None:
        shard.fields["returns"] = computed.returns.float().numpy()
    sums = torch.zeros(5, dtype=torch.float64)  # tokens, KL, excluded; KL to the teacher, excluded
    sums[0] = float((mask != 0).sum())
    if computed.kl is not None:
        sums[1:3] = computed.kl
    if options.is_whitened:
        advantages = whiten(advantages, mask, _added_up(moments(advantages, mask), device))
    if options.opd_coef is not None:
        if "teacher_log_probs" not in columns:
            raise ValueError(
                "--use-opd: samples of this rollout have no teacher_log_probs; let a function set them for every sample"
                " that trains, or give --opd-teacher-load"
            )
        to_teacher, excluded = reverse_kl_gap(columns["log_probs"], columns["teacher_log_probs"], mask)
        advantages = advantages + options.opd_coef * to_teacher
        sums[3:5] = torch.stack([-to_teacher.double().sum(), excluded.double()])
    shard.fields["advantages"] = advantages.float().numpy()
    tokens, kl, kl_excluded, gap, gap_excluded = _added_up(sums, device).tolist()
    metrics: dict[str, float] = {}
    if options.constants.kl_coef > 0:
        metrics |= {"kl": kl / max(tokens, 1.0), "kl_excluded": kl_excluded}
    if options.opd_coef is not None:
        metrics |= {"opd_kl": gap / max(tokens, 1.0), "opd_excluded": gap_excluded}
    return metrics


def gathered(values: T) -> list[T]:
    """`values` of each data-parallel rank, on each of them, in their order."""
    group = parallel_state.get_data_parallel_group()
    everywhere = [values] * group.size()
    dist.all_gather_object(everywhere, values, group=group)
    return everywhere


def _mean_of_others(shard: TrainShard, values: Tensor) -> Tensor:
    """The mean of the other samples' `values` [n] in each sample's group, wherever these are -> [n]."""
    group = shard.fields["group_index"]
    group = np.where(group < 0, -1 - shard.fields["position"], group)  # of no group: alone
    everywhere = gathered((values.numpy(), group))
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
