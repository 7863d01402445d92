"""The norms of local layers, whose weights sequence parallelism knows."""

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from fusionrl.base import cpu_wing


class LocalNorm(torch.nn.Module):
    """Builds an RMSNorm, torch's on a GPU, its weight marked for the gradient all-reduce of sequence parallelism."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        assert config.normalization == "RMSNorm", config.normalization
        return _norm(config, hidden_size, eps, config.layernorm_zero_centered_gamma)


class PlainNorm(torch.nn.Module):
    """Builds a `LocalNorm` that multiplies by its weight whatever the other norms of the model do."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:
        return _norm(config, hidden_size, eps, False)


def _norm(config: TransformerConfig, hidden_size: int, eps: float, is_zero_centered: bool) -> torch.nn.RMSNorm:
    kind = torch.nn.RMSNorm
    if cpu_wing.lacks_cuda():
        from fusionrl.cpu.row_functions import RowNorm as kind
    if is_zero_centered:
        kind = ZeroCenteredNorm
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


class ZeroCenteredNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] → the same shape and type."""
        weight = self.weight.float() + 1
        if cpu_wing.lacks_cuda():
            from fusionrl.cpu.row_functions import rms_norm

            assert self.eps is not None
            return rms_norm(hidden.float(), weight, self.eps).to(hidden.dtype)
        return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).to(hidden.dtype)
