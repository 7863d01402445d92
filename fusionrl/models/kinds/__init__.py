"""The kinds of layers: one object each, which answers what every room asks of a layer. Pure, without torch.

A decoder layer has an attention and an MLP; `ModelShape.attention` and `ModelShape.mlp` have the kind of each layer. A
new kind is a subclass of `Attention` or `Mlp`. Its Megatron modules are in the table `FIT` of `trainer/layers.py`; a
kind in a plug-in puts them in by its method `fit`. No other file asks for a kind by name.
"""

from fusionrl.models.kinds.attention import Full, Grouped, Latent, Window
from fusionrl.models.kinds.base import Attention, Kind, Mlp, RankSizes
from fusionrl.models.kinds.delta import Delta
from fusionrl.models.kinds.mlp import Dense, Experts

__all__ = ["Attention", "Delta", "Dense", "Experts", "Full", "Grouped", "Kind", "Latent", "Mlp", "RankSizes", "Window"]
