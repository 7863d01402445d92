"""Code that a CPU runs in another way than other devices; "meta" stands for every device but a CPU."""

import sys
from types import SimpleNamespace

import torch

from fusionrl.algorithms.sequences import Sequences


def test_both_forms_of_spreading_are_the_same() -> None:
    index = torch.tensor([0, 1, 1, 2])
    here, there = Sequences(index, 3), Sequences(index.to("meta"), 3)
    assert here.spread(torch.arange(3.0)).tolist() == torch.arange(3.0)[index].tolist() == [0, 1, 1, 2]
    found = there.spread(torch.arange(3.0, device="meta"))
    assert (found.device.type, found.shape) == ("meta", (4,))


def test_a_gpus_tokens_are_drawn_by_sglangs_own_function(monkeypatch) -> None:
    from fusionrl.cpu import sglang_layers

    asked: list[str] = []

    def noted(probs: torch.Tensor, *rest: object, **options: object) -> None:
        asked.append(probs.device.type)

    class Batch:
        @classmethod
        def from_schedule_batch(cls) -> None: ...

    sampler = SimpleNamespace(sampling_from_probs_torch=noted, top_k_top_p_min_p_sampling_from_probs_torch=noted)
    batches = SimpleNamespace(sampling_batch_info=SimpleNamespace(SamplingBatchInfo=Batch))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers", SimpleNamespace(sampler=sampler))
    monkeypatch.setitem(sys.modules, "sglang.srt.sampling", batches)
    sglang_layers.register_sampling()
    for device in ("cpu", "meta"):
        sampler.sampling_from_probs_torch(torch.ones(64, 4096, device=device))
    assert asked == ["meta"]


def test_torchs_device_module_is_the_cpus_without_a_gpu(monkeypatch) -> None:
    """Also of a torch that was built for CUDA, whose answer is `torch.cuda`."""
    from fusionrl.cpu import sglang_patches

    usual = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: usual("cuda" if device is None else device))
    sglang_patches.name_device()
    assert torch.get_device_module() is torch.cpu and torch.get_device_module("cuda") is torch.cuda
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert torch.get_device_module() is torch.cuda
