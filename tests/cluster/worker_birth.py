"""As `fusionrl.cluster.worker_birth`, with the classes of the tests' actors imported."""

from __future__ import annotations

import tests.cluster.fakes
import tests.cluster.test_guests
import tests.cluster.test_spanning  # noqa: F401
from fusionrl.cluster.worker_birth import main

__all__ = ["main"]
