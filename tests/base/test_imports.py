"""Large libraries are imported without collections of garbage."""

from __future__ import annotations

import gc

import pytest

from fusionrl.base.imports import without_collections


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_rests_and_goes_on_as_before(was_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def test_nothing_is_set_aside_where_nothing_was_imported() -> None:
    """Else whatever lives at that moment would never be collected."""
    before = gc.get_freeze_count()
    with without_collections():
        pass
    assert gc.get_freeze_count() == before
