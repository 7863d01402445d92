"""An engine that another process has started, by its address: its endpoints as methods, its life somebody else's."""

from __future__ import annotations

from typing import Any

from fusionrl.engines.engine import EngineActor
from fusionrl.engines.spec import EngineSpec


class AttachedEngine(EngineActor):
    """Controls the server at `url`. Unlike the actor it can be pickled; of a server that died it knows no log."""

    def __init__(self, index: int, url: str, tp_size: int, api_key: str | None = None) -> None:
        super().__init__(EngineSpec(index, "", "cpu", "bfloat16", tp_size, (), "", api_key, "", 0))
        self.url = url

    def post(self, path: str, payload: dict[str, Any] | None = None) -> Any:
        """Any other request."""
        return self._post(path, payload)

    def _living(self, what: str) -> Any:
        return None

    def _server_death(self, path: str, cause: RuntimeError) -> None:
        return
