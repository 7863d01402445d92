"""The advantages of one rank's shard: whole samples' spread over their tokens, or token by token from log-probs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.algorithms.distillation import add_reverse_kl
from fusionrl.algorithms.gae import gae, truncated_values
from fusionrl.algorithms.prime import prime_advantages
from fusionrl.algorithms.responses import Responses
from fusionrl.algorithms.returns import discounted_returns
from fusionrl.algorithms.rloo import leave_one_out
from fusionrl.algorithms.token_rewards import kl_rewards, score_rewards
from fusionrl.algorithms.whitening import moments, whiten
from fusionrl.config.config import Config
from fusionrl.data.train_batch import TrainShard
from fusionrl.trainer.selection import gathered

# Their rewards are token by token, and the Buffer leaves them as the reward functions gave them.
OF_TOKENS = ("reinforce_plus_plus", "ppo")
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "prime")


@dataclass(frozen=True)
class AdvantageOptions:
    """What advantages need of the configuration.

    bootstraps  a truncated response is worth its last value
    opd_coef    None: no teacher
    """

    estimator: str
    gamma: float
    lambd: float
    bootstraps: bool
    kl_coef: float
    kl_type: str
    is_whitened: bool
    opd_coef: float | None
    process_coef: float
    outcome_coef: float

    @classmethod
    def from_config(cls, config: Config) -> AdvantageOptions:
        """The options of `config`."""
        algorithm = config.algorithm
        return cls(
            estimator=algorithm.advantage_estimator,
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            bootstraps=algorithm.bootstrap_truncated,
            kl_coef=algorithm.kl_coef,
            kl_type=algorithm.kl_coef_type,
            is_whitened=algorithm.normalize_advantages or algorithm.advantage_estimator in WHITENED,
            opd_coef=algorithm.opd_kl_coef if algorithm.use_opd else None,
            process_coef=config.prm.prm_process_coef,
            outcome_coef=config.prm.prm_outcome_coef,
        )

    @property
    def needs_log_probs(self) -> bool:
        """Whether the trainers' log-probs go into them."""
        return self.kl_coef > 0 or self.opd_coef is not None


def add_advantages(shard: TrainShard, options: AdvantageOptions, device: torch.device) -> dict[str, float]:
    """Set the shard's `advantages`, and with a critic its `returns`. A collective of the data-parallel ranks.

    Returns:
        Metrics over all ranks, without prefix: kl (policy to reference, where it is a price), opd_kl (policy to
        teacher), and the number of tokens left out of either because a log-prob was not finite.

    Raises:
        ValueError: rewards, values or log-probs that no advantage can be computed from.
    """
    columns = {name: torch.from_numpy(array) for name, array in shard.fields.items() if array.dtype == np.float32}
    mask = columns["loss_mask"]
    responses = Responses(mask, torch.from_numpy(shard.response_lengths.astype(np.int64)))
    rewards = columns["rewards"]
    sums = torch.zeros(5, dtype=torch.float64)  # tokens, KL, excluded; KL to the teacher, excluded
    sums[0] = float((mask != 0).sum())
    if options.estimator in OF_TOKENS:
        of_tokens = score_rewards(rewards, responses)
        if options.kl_coef > 0:
            names = ("log_probs", "ref_log_probs")
            price, excluded = kl_rewards(*(columns[n] for n in names), mask, options.kl_type, options.kl_coef)
            of_tokens = of_tokens + price
            sums[1:3] = torch.stack([-price.double().sum() / options.kl_coef, excluded.double()])
        if options.estimator == "ppo":
            values, last = columns["values"], None
            if options.bootstraps:
                last = truncated_values(values, responses, torch.from_numpy(shard.fields["truncated"]))
            advantages, returns = gae(of_tokens, values, responses, options.gamma, options.lambd, last)
            shard.fields["returns"] = returns.float().numpy()
        else:
            advantages = discounted_returns(of_tokens, responses, options.gamma)
    elif options.estimator == "prime":
        process = columns["process_rewards"]
        baselines = torch.from_numpy(_process_baselines(shard, responses.mean(process, "process reward").numpy()))
        coefs = (options.gamma, options.process_coef, options.outcome_coef)
        advantages = prime_advantages(process, baselines, rewards, responses, *coefs)
    else:
        advantages = responses.spread(rewards)
    if options.is_whitened:
        advantages = whiten(advantages, mask, _added_up(moments(advantages, mask), device))
    if options.opd_coef is not None:
        if "teacher_log_probs" not in columns:
            raise ValueError("--use-opd: samples of this rollout have no teacher_log_probs")
        student, teacher = columns["log_probs"], columns["teacher_log_probs"]
        gap, excluded = add_reverse_kl(torch.zeros_like(advantages), student, teacher, mask, 1.0)
        advantages = advantages + options.opd_coef * gap
        sums[3:5] = torch.stack([-gap.double().sum(), excluded.double()])
    shard.fields["advantages"] = advantages.float().numpy()
    return _metrics(_added_up(sums, device).tolist(), options)


def _process_baselines(shard: TrainShard, means: np.ndarray) -> np.ndarray:
    """The mean of the other samples' `means` [n] in each sample's group, wherever these are -> [n]."""
    group = shard.fields["group_index"]
    group = np.where(group < 0, -1 - shard.fields["position"], group)  # of no group: alone
    everywhere = gathered((means, group))
    baselines = leave_one_out(*(np.concatenate(parts) for parts in zip(*everywhere, strict=True)))
    first = sum(len(part[0]) for part in everywhere[: parallel_state.get_data_parallel_rank()])
    return baselines[first : first + len(means)]


def _metrics(sums: list[float], options: AdvantageOptions) -> dict[str, float]:
    tokens, found = max(sums[0], 1.0), {}
    if options.kl_coef > 0:
        found |= {"kl": sums[1] / tokens, "kl_excluded": sums[2]}
    if options.opd_coef is not None:
        found |= {"opd_kl": sums[3] / tokens, "opd_excluded": sums[4]}
    return found


def _added_up(values: Tensor, device: torch.device) -> Tensor:
    """The sum over data-parallel ranks; context-parallel ones have the same whole samples."""
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return values
    values = values.to(device)
    dist.all_reduce(values, group=group)
    return values.cpu()
