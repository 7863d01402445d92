"""torch's device module where torch was built for CUDA and there is no GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from fusionrl.cpu import torch_device


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build's answer without a device."""
    usual = torch.get_device_module

    def of_cuda(device: torch.device | str | None = None) -> ModuleType:
        return usual("cuda" if device is None else device)

    monkeypatch.setattr(torch, "get_device_module", of_cuda)
    assert torch.get_device_module() is torch.cuda


def test_it_is_the_cpus(built_for_cuda: None) -> None:
    torch_device.register()
    once = torch.get_device_module
    torch_device.register()
    assert torch.get_device_module is once
    assert torch.get_device_module() is torch.cpu
    torch.get_device_module().synchronize()
    assert torch.get_device_module("cuda") is torch.cuda, "whoever names a device gets its module"


def test_a_gpu_keeps_its_own(built_for_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch_device.register()
    assert torch.get_device_module() is torch.cuda
