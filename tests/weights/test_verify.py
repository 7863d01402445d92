"""The verification of a push, where an engine's answer says something strange of its weights."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusionrl.engines.answers import Generation
from fusionrl.weights import verify
from fusionrl.weights.verify import Verification, WeightMismatch


def of_version_2(placeholder: int = -1) -> Verification:
    settings: dict[str, Any] = {"api_key": None, "vocab_size": 8, "temperature": 1.0, "tolerance": 1e-3}
    targets: Any = [SimpleNamespace(index=3)]
    return Verification([], targets, ["http://x"], version=2, is_exact=True, placeholder=placeholder, **settings)


@pytest.mark.parametrize(("stamped", "shown"), [("default", r"\['default'\]"), ("99999999999", r"\['99999999999'\]")])
def test_a_version_that_is_no_number_is_a_mismatch(stamped: str, shown: str, monkeypatch: Any) -> None:
    answer = Generation(np.zeros(2, np.int32), np.zeros(2, np.float32), "", "stop", [(stamped, 2)], 1, 0, {})

    async def ask(*_: Any) -> list[list[Generation]]:
        return [[answer]]

    monkeypatch.setattr(verify, "_ask", ask)
    verification = of_version_2()
    with pytest.raises(WeightMismatch, match=rf"engine 3: stamped version {shown} after a push of version 2"):
        verification.ask_probe()


def test_prompts_have_no_placeholder_of_an_image() -> None:
    plain, seeing = (of_version_2(placeholder)._prompts() for placeholder in (-1, 5))
    assert 5 in np.concatenate(plain) and 5 not in np.concatenate(seeing)
    assert [len(prompt) for prompt in seeing] == [len(prompt) for prompt in plain]
