"""A router without a key is for one machine alone."""

from __future__ import annotations

import pytest

from fusionrl.runtime.launcher import check_open_router


@pytest.mark.parametrize(("asks", "is_alone"), [(True, True), (True, False), (False, True)])
def test_a_router_on_loopback_may_ask_nobody(asks: bool, is_alone: bool) -> None:
    check_open_router(asks, is_alone)


def test_a_router_on_the_network_asks_for_its_key() -> None:
    with pytest.raises(ValueError, match="--router-api-key none: on several nodes"):
        check_open_router(False, False)
