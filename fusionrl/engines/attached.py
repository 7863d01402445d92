"""An engine that another process has started, by its address: its endpoints as methods, its life somebody else's."""

from __future__ import annotations

from collections.abc import Mapping

from fusionrl.engines.control import EngineControl


class AttachedEngine(EngineControl):
    """Controls the server at `url`. Unlike the actor it can be pickled; of a server that died it knows no log."""

    def __init__(self, index: int, url: str, tp_size: int, api_key: str | None = None) -> None:
        super().__init__(url, tp_size, api_key)
        self.index = index

    def post(self, path: str, payload: Mapping[str, object] | None = None) -> object:
        """Any other request."""
        return self._post(path, payload)
