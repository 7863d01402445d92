"""Room `config`: the run's configuration as frozen pydantic groups, and the command line generated from them.

Pure: imports neither ray, megatron nor sglang. Upstream field lists are read in `upstream.py` alone, and only
when a command line names a flag that is not fusionrl's own.
"""

from fusionrl.config.config import Config
from fusionrl.config.model_shape import ModelShape

__all__ = ["Config", "ModelShape"]
