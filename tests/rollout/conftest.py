from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusionrl.base.environment import extended_environment
from fusionrl.engines.engine import EngineActor
from tests.rollout.engine import sglang_engine

if TYPE_CHECKING:
    from tests.warm_nursery import EngineBranch


@pytest.fixture(scope="session")
def served(
    engine_branch: EngineBranch, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineActor]:
    """An SGLang server of the tiny model, for the tests of the group "served": none changes its weights."""
    engine = sglang_engine(tiny_model, tmp_path_factory.mktemp("served"), 16384)
    with extended_environment(engine_branch.variables):
        engine.start()
    yield engine
    engine.shutdown()
