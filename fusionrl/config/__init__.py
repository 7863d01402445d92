"""Room `config`: the run's configuration as frozen pydantic groups, and the command line generated from them."""

from fusionrl.config.config import Config

__all__ = ["Config"]
