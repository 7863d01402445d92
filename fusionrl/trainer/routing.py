"""Routing replay: a mixture's routers choose the experts that they, or the engine, chose before.

A router near a tie sends a token to other experts after an optimizer step, or on another machine; the token's log-prob
then jumps though the policy hardly changed. Two remedies hold the choice fixed and leave the weights of the chosen
experts to the current router, whose gradient stays whole:

R2  the choice of the log-prob pass before the first step ("Routing Replay" in the GSPO paper, arXiv 2507.18071)
R3  the choice of the engine that sampled the tokens (arXiv 2510.11370)

Megatron-core (0.16.1 and 0.19) asks an object at `TopKRouter.router_replay` for each top-k. Its own keeps one queue a
router and phase; this one learns which micro-batch runs, so that forward passes ahead of their backward passes,
pipeline chunks and recomputation need no order.
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from fusionrl.data.train_batch import TrainShard
from fusionrl.models.rules import MTP
from fusionrl.models.shape import ModelShape

Chosen = tuple[Tensor, Tensor]  # scores and numbers of experts, [tokens, topk]

FLAG = "--use-rollout-routing-replay"
FREE = -1  # in place of each expert of a token whose router chooses by itself


class RoutingReplay:
    """All routers of this rank, in the order of their layers.

    layers  of the model, from 0, that the routers are in
    topk    experts of a token
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], topk: int, device: torch.device) -> None:
        named = (item for chunk in chunks for item in chunk.named_modules())
        # Those of layers of multi-token prediction are free: no engine says what they chose.
        routers = [m for name, m in named if isinstance(m, TopKRouter) and f".{MTP}" not in f".{name}"]
        self.layers = [router.layer_number - 1 for router in routers]
        self.topk, self.device = topk, device
        self._experts: Tensor | None = None
        self._has_free = False
        self._is_recording = False
        for index, router in enumerate(routers):
            # In place of Megatron-core's own `RouterReplay`.
            router.router_replay = SimpleNamespace(get_replay_topk=partial(self._choose, index))

    def begin(self, experts: Tensor | None, record: bool = False) -> None:
        """Say what the next passes are of: `experts` [tokens, layers, topk] to choose, or with `record` to write to.

        None lets the routers choose.
        """
        self._is_recording = record
        self._has_free = not record and experts is not None and bool((experts == FREE).any())
        self._experts = None if experts is None else experts.to(self.device)

    def again_in_backward(self, output: Tensor, experts: Tensor | None) -> None:
        """Begin anew with the backward pass of `output`, for layers that are recomputed there."""
        if output.requires_grad:
            output.register_hook(lambda grad: self.begin(experts))

    def new_record(self, num_tokens: int) -> Tensor:
        """Room for what the routers choose for `num_tokens` tokens, of this rank's part of the sequence."""
        return torch.full((num_tokens, len(self.layers), self.topk), FREE, dtype=torch.int16, device=self.device)

    def _choose(
        self,
        index: int,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default: Callable[..., Chosen],
    ) -> Chosen:
        """(scores of the experts, the experts) for router `index`; `default` computes the usual choice from `scores`.

        scores [tokens, experts]
        """
        by_itself = partial(default, scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._experts is None:
            return by_itself()
        if self._is_recording:
            values, chosen = by_itself()
            self._experts[:, index] = chosen
            return values, chosen
        chosen = self._experts[:, index].long()
        assert chosen.size(0) == scores.size(0), f"experts of {chosen.size(0)} tokens for {scores.size(0)}"
        if self._has_free:
            chosen = torch.where(chosen == FREE, by_itself()[1], chosen)
        return scores.gather(1, chosen), chosen


def check_rollout_routing(shard: TrainShard, shape: ModelShape) -> None:
    """Refuse a rollout whose recorded experts are not those of this model.

    Raises ValueError, which names the field, the sample and what is expected.
    """
    mixture = shape.mixture
    assert mixture is not None
    name = "rollout_routed_experts"
    if name not in shard.fields:
        raise ValueError(
            f"{FLAG}: the rollout's samples have no {name}; set it in the function that generates them, or leave the"
            " flag out (--use-routing-replay needs no engine)"
        )
    experts = shard.fields[name]
    want = (shape.num_layers, mixture.topk)
    if shard.num_samples and experts.shape[1:] != want:
        raise ValueError(
            f"{FLAG}: {name} has {experts.shape[1]} layers of {experts.shape[2]} experts; the model has"
            f" {want[0]} layers (those without experts count) of {want[1]}"
        )
    layers, ends = list(shape.expert_layers), np.cumsum(shard.total_lengths)
    for sample, (end, length) in enumerate(zip(ends, shard.total_lengths, strict=True)):
        if message := _first_fault(experts[end - length : end, layers], layers, mixture.num_experts):
            raise ValueError(f"{FLAG}: {name} of sample {int(shard.fields['sample_index'][sample])}: {message}")


def _first_fault(experts: np.ndarray, layers: list[int], num_experts: int) -> str | None:
    """experts [tokens, mixtures, topk]."""
    ordered = np.sort(experts, axis=-1)
    free = (experts == FREE).all(-1)
    outside = ((ordered[..., 0] < 0) | (ordered[..., -1] >= num_experts)) & ~free
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~free
    for fault, problem in ((outside, f"an expert outside 0 … {num_experts - 1}"), (twice, "an expert twice")):
        if fault.any():
            token, layer = (int(i) for i in np.argwhere(fault)[0])
            choice = experts[token, layer].tolist()
            return f"token {token} has {problem} in layer {layers[layer]} ({choice}); was that layer recorded?"
    return None
