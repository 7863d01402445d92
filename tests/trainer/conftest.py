from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.local_ranks import LocalRanks


@pytest.fixture(scope="session")
def workers(forkserver: None) -> Iterator[LocalRanks]:
    """Processes for two ranks, and for one alone, that all tests share; each test starts its own actors in them."""
    pool = LocalRanks(3)
    yield pool
    pool.close()
