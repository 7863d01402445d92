"""The verification of a push, where an engine's answer says something strange of its weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusionrl.engines.generation import Generation
from fusionrl.weights import verify
from fusionrl.weights.verify import WeightMismatch, verify_push


@pytest.mark.parametrize(("stamped", "shown"), [("default", r"\['default'\]"), ("99999999999", r"\['99999999999'\]")])
def test_a_version_that_is_no_number_is_a_mismatch(stamped: str, shown: str, monkeypatch: Any) -> None:
    answer = Generation(np.zeros(2, np.int32), np.zeros(2, np.float32), "", "stop", [(stamped, 2)], 1, 0, {})

    async def ask(*_: Any) -> list[list[Generation]]:
        return [[answer]]

    monkeypatch.setattr(verify, "_compare_checksums", lambda *_: (0, {}))
    monkeypatch.setattr(verify, "_ask", ask)
    with pytest.raises(WeightMismatch, match=rf"engine 3: stamped version {shown} after a push of version 2"):
        verify_push(
            [],
            [SimpleNamespace(index=3)],  # type: ignore[list-item]
            ["http://x"],
            api_key=None,
            vocab_size=8,
            version=2,
            temperature=1.0,
            tolerance=1e-3,
            is_exact=True,
        )
