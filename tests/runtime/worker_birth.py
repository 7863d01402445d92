"""As `fusionrl.runtime.worker_fork`, with the classes of the tests' actors imported."""

import tests.runtime.fakes
import tests.runtime.test_engine_pool
import tests.runtime.test_multi_node_engine
import tests.runtime.test_supervisor  # noqa: F401
from fusionrl.runtime.worker_fork import main

__all__ = ["main"]
