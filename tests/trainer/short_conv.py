"""transformers' Llama with the layers of plugins/models/short_conv.py, in plain torch: what that plug-in must equal."""

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class ShortConvConfig(LlamaConfig):
    """Llama's, with the type of each layer and the tokens that a convolution sees."""

    model_type = "short_conv"
    conv_size: int = 3
    layer_types: list[str] | None = None


class PlainConv(nn.Module):
    """c * conv(b * x), each sequence by itself."""

    def __init__(self, config: ShortConvConfig) -> None:
        super().__init__()
        size, hidden = config.conv_size, config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.conv = nn.Conv1d(hidden, hidden, size, padding=size - 1, groups=hidden, bias=False)
        self.out_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden_states: Tensor, **unused: object) -> tuple[Tensor, None]:
        """[batch, t, h] → the same shape, and no attention weights."""
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        rows = self.conv((b * x).transpose(1, 2))[..., : hidden_states.size(1)]
        return self.out_proj(c * rows.transpose(1, 2)), None


class ShortConvForCausalLM(LlamaForCausalLM):
    """Llama's, with convolutions in the layers that say so."""

    config_class = ShortConvConfig

    def __init__(self, config: ShortConvConfig) -> None:
        super().__init__(config)
        for layer, kind in zip(self.model.layers, config.layer_types or [], strict=True):
            if kind == "conv":
                layer.self_attn = PlainConv(config).to(torch.get_default_dtype())


AutoConfig.register("short_conv", ShortConvConfig)
AutoModelForCausalLM.register(ShortConvConfig, ShortConvForCausalLM)
