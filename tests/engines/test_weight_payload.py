"""What a push sends by value is a pickle that SGLang reads."""

import io
import pickle
import pickletools

import pybase64
import pytest
import torch

from fusionrl.engines.weight_payload import SharedBuffer, by_value, map_segment, take
from tests.own_process import run_code


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


def test_a_shared_buffer_is_read_where_its_index_says() -> None:
    """Of several types and sizes, a scalar and an empty tensor; the views are the memory itself."""
    buffer = SharedBuffer(200, "slot")
    wide = buffer.flat[:48].view(torch.float32).view(3, 4)
    half = buffer.flat[48:64].view(torch.bfloat16).view(2, 2, 2)
    one, none = buffer.flat[64:68].view(torch.float32).view(()), buffer.flat[68:68].view(torch.float32).view(0, 5)
    named = [("wide", wide), ("half", half), ("one", one), ("none", none)]
    for _, tensor in named:
        tensor.copy_(torch.randn(tensor.shape))
    found = take(pickle.loads(pybase64.b64decode(buffer.payload(named))))
    assert [name for name, _ in found] == ["wide", "half", "one", "none"]
    for (_, tensor), (_, view) in zip(named, found, strict=True):
        assert view.dtype is tensor.dtype and view.shape == tensor.shape and view.is_contiguous()
        assert torch.equal(view, tensor)
    wide.fill_(7.0)
    assert found[0][1].eq(7.0).all()


def test_a_segment_of_a_sender_that_is_gone_is_refused() -> None:
    shared = SharedBuffer(64, "0.0")
    where = shared.where
    mapped = map_segment(where)
    shared.flat.fill_(7)
    assert mapped.tolist() == [7] * 64
    del shared
    assert mapped.tolist() == [7] * 64, "it exists while a process maps it"
    again = SharedBuffer(64, "0.0")  # perhaps under the same number
    assert again.where[1] != where[1]
    with pytest.raises(RuntimeError, match="shared weights: /proc/.* of their sender cannot be opened"):
        map_segment(where)


def test_a_sender_imports_nothing_of_sglang() -> None:
    """In a process of its own: others of this one's tests read SGLang's flags."""
    run_code(
        "import sys, torch, fusionrl.weights.send; from fusionrl.engines.weight_payload import SharedBuffer, by_value\n"
        "shared = SharedBuffer(24); shared.payload([('a', shared.flat.view(torch.float32).view(2, 3))])\n"
        "by_value([('a', torch.ones(2))]); assert 'sglang' not in sys.modules"
    )
