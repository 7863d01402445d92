"""Addresses of a run's engines."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.engines.http import ROUTER_URLS


@dataclass(frozen=True)
class EngineEndpoints:
    """Addresses of the engines; empty in a mode without engines."""

    router_url: str = ""
    engine_urls: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    rm_urls: tuple[str, ...] = ()
    teacher_urls: tuple[str, ...] = ()

    def export(self) -> None:
        """Put the key, and the addresses that get it, into this process's environment: for requests of hooks."""
        if self.api_key is not None:
            os.environ[ROUTER_KEY] = self.api_key
            urls = [self.router_url, *self.engine_urls, *self.rm_urls, *self.teacher_urls]
            os.environ[ROUTER_URLS] = " ".join(urls)
