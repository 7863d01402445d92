"""The Megatron module of the kind in `short_conv.py`."""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from fusionrl.trainer.local_attention import DividedRows
from fusionrl.trainer.packed_row import PackedLayout
from plugins.models.short_conv import ShortConv


class ShortConvolution(DividedRows):
    """A gated short convolution in place of a layer's self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        kind: ShortConv,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp, hidden = groups.tp, config.hidden_size
        self.heads = config.num_attention_heads // self.tp.size()
        common = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        common["tp_group"] = self.tp
        self.in_proj = ColumnParallelLinear(hidden, 3 * hidden, gather_output=False, skip_bias_add=False, **common)
        self.out_proj = RowParallelLinear(hidden, hidden, input_is_parallel=True, skip_bias_add=True, **common)
        self.add_rows("conv_weight", hidden // self.tp.size(), 1, kind.size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """[t, 1, h], sequences packed one after the other → the same shape, and no bias."""
        assert isinstance(packed_seq_params, PackedLayout), "packed sequences only"
        mixed, _ = self.in_proj(hidden_states)
        b, c, x = (part.flatten(1) for part in mixed[:, 0].view(mixed.size(0), self.heads, 3, -1).unbind(2))
        positions = torch.cat([torch.arange(length) for length in packed_seq_params.lengths]).to(mixed.device)
        rows, kernel = b * x, self.conv_weight[:, 0]
        out = rows * kernel[:, -1]
        for back in range(1, kernel.size(1)):
            before = F.pad(rows, (0, 0, back, 0))[: rows.size(0)]  # but not those of the sequence before
            out = out + before * (positions >= back)[:, None] * kernel[:, -1 - back]
        return self.out_proj((c * out)[:, None])
