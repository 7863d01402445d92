"""What a push sends by value is a pickle that SGLang reads."""

from __future__ import annotations

import io
import pickle
import pickletools

import pybase64
import pytest
import torch

from fusionrl.engines.payload import by_value


def test_storages_have_torchs_name_where_another_function_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-core 0.19 replaces torch's function by one of its own; SGLang knows torch's name alone."""

    def stand_in(data: bytes) -> object:
        return torch.load(io.BytesIO(data), weights_only=True)

    monkeypatch.setattr(torch.storage, "_load_from_bytes", stand_in)
    data = pybase64.b64decode(by_value([("a", torch.arange(6.0))]))
    texts = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert {"torch.storage", "_load_from_bytes"} <= texts
    assert "stand_in" not in texts and __name__ not in texts
    [(name, tensor)] = pickle.loads(data)
    assert name == "a" and torch.equal(tensor, torch.arange(6.0))
