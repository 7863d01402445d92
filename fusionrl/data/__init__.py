"""Room `data`: samples, prompt data sets, the train-batch schema and its packing.

Pure: imports neither ray, megatron nor sglang.
"""

from fusionrl.data.sample import Sample

__all__ = ["Sample"]
