"""Large libraries are imported without collections of garbage."""

import gc

import pytest

from fusionrl.base.imports import without_collections


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_rests_and_goes_on_as_before(was_enabled: bool) -> None:
    before, num_frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
        assert gc.get_freeze_count() == num_frozen, "nothing was imported: else it would never be collected"
    finally:
        (gc.enable if before else gc.disable)()
