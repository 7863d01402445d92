from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionrl.trainer.local_ranks import LocalRanks


@pytest.fixture(scope="session")
def workers() -> Iterator[LocalRanks]:
    """Two processes that all tests share; each test starts its own actors in them."""
    pool = LocalRanks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """hf(family, tied, **config) -> (folder, transformers model), made once a session."""
    from tests.trainer import hf_models

    made: dict[Any, tuple[Path, Any]] = {}

    def get(family: str, tied: bool, **values: Any) -> tuple[Path, Any]:
        key = (family, tied, repr(sorted(values.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (folder, hf_models.make(folder, family, tied, **values))
        return made[key]

    return get
