from collections.abc import Iterator

import pytest
import torch

from tests.trainer.local_ranks import LocalRanks

torch.set_num_threads(1)  # models this small keep further threads waiting for each other, and the other core busy


@pytest.fixture(scope="session")
def workers(forkserver: None) -> Iterator[LocalRanks]:
    """Processes for two ranks, and for one alone, that all tests share; each test starts its own actors in them."""
    pool = LocalRanks(3)
    yield pool
    pool.close()
