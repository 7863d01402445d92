"""`Restarts` counts the parts that died and were started again within the run, and stops at --max-restarts.

Engines have a count of their own (--use-fault-tolerance).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from fusionrl.base.wording import headline

logger = logging.getLogger(__name__)

Kind = Literal["router", "buffer", "trainers", "driver"]
_AN_HOUR_S = 3600.0

METRICS = """
run/restarts_<part> | restarts | How often this part (router, buffer, trainers) died and was started again so far, since
    the run was started or resumed. | when it happens
"""


class Restarts:
    """Decides whether a part that died may be started again, and counts. One for the whole run."""

    def __init__(self, max_restarts: int, is_possible: Callable[[], bool] = lambda: True) -> None:
        """`max_restarts`: of all parts together, within any hour; 0: a death ends the run. `is_possible`: now."""
        self.max_restarts, self._is_possible = max_restarts, is_possible
        self._times: list[float] = []  # of the last `max_restarts`
        self._counts: Counter[str] = Counter()
        self._in_vain: dict[str, tuple[int, int]] = {}  # part → progress at its last start, and how many there were

    def begin(self, kind: Kind, error: BaseException, progress: int | None = None) -> None:
        """Note that a part is about to be started again because of `error`; raise it where the limit is reached.

        Without a change of `progress`, which is how far the run has come, the limit is for any time.
        """
        if not self._is_possible():
            logger.error("the %s died, and Ray can start nothing on this machine: its raylet has died, too", kind)
            raise error
        now = time.monotonic()
        if len(self._times) == self.max_restarts and (not self._times or now - self._times[0] < _AN_HOUR_S):
            if self._times:
                logger.error("the %s: --max-restarts %d an hour are used up", kind, self.max_restarts)
            raise error
        if progress is not None:
            before, num_starts = self._in_vain.get(kind, (progress, 0))
            num_starts = num_starts + 1 if progress == before else 1
            if num_starts > self.max_restarts:
                logger.error("the %s: started %d times again without a step in between", kind, self.max_restarts)
                raise error
            self._in_vain[kind] = progress, num_starts
        self._times = [*self._times, now][-self.max_restarts :]
        self._counts[kind] += 1
        logger.warning(
            "starting the %s again (%d of --max-restarts %d in the last hour): %s",
            *(kind, sum(now - since < _AN_HOUR_S for since in self._times), self.max_restarts),
            next(iter(headline(str(error)).splitlines()), type(error).__name__),
        )

    def metrics(self) -> dict[str, float]:
        """Return the counts so far, of the parts that have one."""
        return {f"run/restarts_{kind}": float(count) for kind, count in self._counts.items()}
