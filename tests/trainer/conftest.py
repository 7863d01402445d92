from collections.abc import Iterator

import pytest
import torch

from tests.trainer.local_ranks import LocalRanks


@pytest.fixture(scope="module", autouse=True)  # of a package it would end with the session, as this folder is none
def one_thread() -> Iterator[None]:
    """Models this small keep further threads waiting for each other, and the other core busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def workers(forkserver: None) -> Iterator[LocalRanks]:
    """Processes for two ranks, and for one alone, that all tests share; each test starts its own actors in them."""
    pool = LocalRanks(3)
    yield pool
    pool.close()
