"""The engines, or the router, that a client may send its requests to, and which one is next."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fusionrl.engines.answer_checks import AnswerError

logger = logging.getLogger(__name__)


class RequestTargets:
    """URLs of `/generate`: those that requests go to, and those that a refused answer's request goes to instead."""

    def __init__(self, base_url: str, worker_urls: Sequence[str] = (), engine_urls: Sequence[str] = ()) -> None:
        """Arguments as of `GenerateClient`."""
        self.urls = [_generate_url(url) for url in worker_urls or [base_url]]
        self.engines = [_generate_url(url) for url in engine_urls or worker_urls or [base_url]]
        self.num_refused = 0
        """Answers that violated the bounds of their request (`AnswerBounds`)."""
        self._under_way = dict.fromkeys(self.urls, 0)

    def set_engines(self, urls: Sequence[str]) -> None:
        """Take other engines: one that died is back at another address."""
        if self.urls == self.engines:  # requests go to the engines, not to the router
            self.urls = [_generate_url(url) for url in urls]
        self.engines = [_generate_url(url) for url in urls]
        self._under_way |= {url: 0 for url in self.urls if url not in self._under_way}

    def choose(self, routing_key: str | None, attempt: int, refused: Sequence[str]) -> str:
        """Return the URL for try number `attempt`; each try goes to another engine, if there are several.

        refused  URLs that gave answers which were refused; this try goes elsewhere
        """
        if refused:
            candidates = [url for url in self.engines if url not in refused] or self.engines
            candidates = sorted(candidates, key=lambda url: self._under_way.get(url, 0))
            return candidates[(attempt + self.num_refused) % len(candidates)]
        if len(self.urls) == 1:
            return self.urls[0]
        if routing_key is not None:
            first = zlib.crc32(routing_key.encode())
            return self.urls[(first + attempt) % len(self.urls)]
        return sorted(self.urls, key=self._under_way.__getitem__)[attempt % len(self.urls)]

    def refuse(self, url: str, error: AnswerError, refused: list[str]) -> None:
        """Count an answer that was refused, and add who gave it to `refused`, those of the request so far.

        Raises:
            AnswerError: it is the second one of an engine, or the second one where there is one engine.
        """
        self.num_refused += 1
        refused.append(url)
        num_known = sum(refused_url in self.engines for refused_url in refused)
        if num_known >= 2 or (len(self.engines) == 1 and len(refused) >= 2):
            raise AnswerError(f"{url}: the answer is refused, as one before it was: {error}") from error
        logger.warning("%s: the answer is refused (%s); the request is sent once more, elsewhere", url, error)

    @contextmanager
    def counted(self, url: str) -> Iterator[None]:
        """Count a request to `url` as long as the block runs."""
        self._under_way[url] = self._under_way.get(url, 0) + 1
        try:
            yield
        finally:
            self._under_way[url] -= 1


def _generate_url(url: str) -> str:
    return url.rstrip("/") + "/generate"
