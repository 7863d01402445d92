"""What tests of routing replay run in a rank, a hook that disturbs routers, and routing forced on transformers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np


def _routers(chunks: Any) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


def watch(actor: Any) -> None:
    """Note the experts of every pass through a router: by layer and kind of pass, in order."""
    import torch

    actor.watched = {}

    def note(router: Any, args: Any, output: Any) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1
        kind = "recomputed" if is_recomputed else "update" if router.training else "score"
        actor.watched.setdefault((router.layer_number - 1, kind), []).append(output[1].bool().cpu().numpy().copy())

    for router in _routers(actor.trained.chunks):
        router.register_forward_hook(note)


def watched(actor: Any) -> dict[tuple[int, str], list[np.ndarray]]:
    """(layer, kind of pass) → of each micro-batch [tokens, experts], whether the token goes there; then forgets it."""
    found, actor.watched = actor.watched, {}
    return found


def disturb(args: Any, rollout_id: int, step: int, chunks: Any, optimizer: Any, scheduler: Any) -> None:
    """--custom-megatron-before-train-step-hook-path: from the second step on, routers that would choose otherwise."""
    import torch

    for router in _routers(chunks) if step > 0 else ():
        generator = torch.Generator().manual_seed(router.layer_number)
        with torch.no_grad():
            router.weight.add_(torch.randn(router.weight.shape, generator=generator))


def scores(actor: Any, shard: Any) -> list[np.ndarray]:
    """Log-probs as of before the first step, of every response token, sample by sample."""
    from fusionrl.trainer.score import score_samples

    return score_samples(shard, actor.scorer, all_responses=True, routing="fixed").samples


@contextlib.contextmanager
def forced(model: Any, experts: np.ndarray) -> Iterator[None]:
    """Within it, the mixtures of a transformers model choose `experts` [tokens, mixtures, topk] in one forward pass."""
    import torch

    count, topk, original = experts.shape[1], experts.shape[2], torch.topk
    config = model.config
    num_experts = next(
        getattr(config, n) for n in ("num_local_experts", "n_routed_experts", "num_experts") if hasattr(config, n)
    )
    calls = []

    def choose(scores: Any, k: int, *args: Any, **kwargs: Any) -> Any:
        if k != topk or scores.shape[-1] != num_experts or scores.dim() != 2:
            return original(scores, k, *args, **kwargs)  # groups of experts
        chosen = torch.from_numpy(experts[: len(scores), len(calls)].astype(np.int64))
        calls.append(1)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    torch.topk = choose
    try:
        yield
    finally:
        torch.topk = original
    assert len(calls) == count, f"{len(calls)} choices for {count} mixtures"
