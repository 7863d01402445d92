"""Adam as Megatron-core's distributed optimizer expects it, where Transformer Engine and apex are absent.

Megatron-core falls back to torch's AdamW there, whose step count is a tensor a parameter: a fresh optimizer
cannot describe its state for a checkpoint, `fully_reshardable` checkpoints do not load, and after a load all
parameters share one step tensor, so that the bias correction is silently wrong. The kernel here is torch's
own fused one (CPU and CUDA); only the bookkeeping is that of Transformer Engine's FusedAdam: one step count a
parameter group.
"""

import importlib.util
from collections.abc import Callable, Iterable

import torch


class FusedAdam(torch.optim.Optimizer):
    """Decoupled weight decay Adam (arXiv 1711.05101) with fp32 moments and a step count a group.

    Raises ValueError for an option of FusedAdam that torch's kernel does not have.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **unused: object,
    ) -> None:
        if not (bias_correction and adam_w_mode):
            raise ValueError("Adam without bias correction, or with weight decay in the gradient, is not supported")
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, grad_scaler: object = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None, "Megatron-core's optimizers use none"
        assert grad_scaler is None, "Megatron-core's optimizers use none"
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not params:
                continue
            for param in params:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
            step = torch.tensor(float(group["step"]), device=params[0].device)
            torch._fused_adamw_(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [step] * len(params),  # the kernel reads it and leaves counting to its caller
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def patch() -> None:
    """Make Megatron-core use `FusedAdam` where neither Transformer Engine nor apex is installed."""
    if importlib.util.find_spec("transformer_engine") or importlib.util.find_spec("apex"):
        return
    import megatron.core.optimizer as mcore_optimizer
    from megatron.core.optimizer import distrib_optimizer

    mcore_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    # Named after where FusedAdam comes from; what they select is its layout of state.
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = True
