"""Addresses of a run's engines."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.engines.http import ROUTER_URLS


@dataclass(frozen=True)
class EngineEndpoints:
    """Addresses of the engines; empty in a mode without engines, `eval_…` without --eval-num-gpus."""

    router_url: str = ""
    engine_urls: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    rm_urls: tuple[str, ...] = ()
    teacher_urls: tuple[str, ...] = ()
    eval_router_url: str = ""
    eval_urls: tuple[str, ...] = ()

    def for_evaluation(self) -> EngineEndpoints:
        """Return the same with the engines that evaluate in place of those that generate, where these are others."""
        if not self.eval_urls:
            return self
        return replace(self, router_url=self.eval_router_url, engine_urls=self.eval_urls)

    def export(self) -> None:
        """Put the key, and the addresses that get it, into this process's environment: for requests of hooks."""
        if self.api_key is not None:
            os.environ[ROUTER_KEY] = self.api_key
            urls = [self.router_url, *self.engine_urls, *self.rm_urls, *self.teacher_urls]
            urls += [self.eval_router_url, *self.eval_urls]
            os.environ[ROUTER_URLS] = " ".join(urls)
