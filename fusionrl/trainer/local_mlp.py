"""The gated MLP of the local layer spec: Megatron's, with gate and product as one function of autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from fusionrl.trainer.swiglu import swiglu


def adopt(model: torch.nn.Module) -> None:
    """Make every MLP of `model` that is Megatron's own a `LocalMLP`; those of experts stay.

    Not by the layers' spec: Megatron complains of an MLP in it that it does not know.
    """
    for name, module in model.named_modules():
        if type(module) is MLP and ".experts." not in name:
            module.__class__ = LocalMLP


class LocalMLP(MLP):
    """Megatron's MLP; one with biases, or with another gate than plain SiLU, runs Megatron's forward pass."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] → the same shape, and no bias."""
        if per_token_scale is not None or not self._is_plain:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        both, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(both))

    @property
    def _is_plain(self) -> bool:
        config = self.config
        is_silu = config.gated_linear_unit and config.activation_func is F.silu
        is_changed = config.activation_func_clamp_value is not None or config.glu_linear_offset != 0.0
        is_fused = config.use_te_activation_func or config.bias_activation_fusion
        return is_silu and not (is_changed or is_fused or config.add_bias_linear)
