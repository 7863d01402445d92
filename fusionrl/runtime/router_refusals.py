"""Requests that the router refused: their sender sees a bare 401, so the driver's log explains it."""

from __future__ import annotations

import logging
from typing import Protocol

from fusionrl.engines.post_request import NO_KEY

logger = logging.getLogger(__name__)


class Refusing(Protocol):
    """A router."""

    url: str

    def num_refused(self) -> int:
        """Requests that it has answered with 401."""
        ...


class RefusalWatch:
    """Tells of the requests that a router refused, after each rollout and evaluation."""

    def __init__(self, router: Refusing) -> None:
        self._router, self._told = router, 0

    def tell(self) -> None:
        """Log how many there were since the last call, and what to do; nothing where there were none."""
        try:
            count = self._router.num_refused()
        except RuntimeError as error:  # of a router that is dead, somebody else speaks
            logger.debug("the router does not say how many requests it refused: %s", error)
            return
        if count > self._told:
            logger.warning(
                "the router at %s answered 401 to %d requests: %s", self._router.url, count - self._told, NO_KEY
            )
        self._told = count
