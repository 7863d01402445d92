"""tools/bench/loss.py: what it measures with, and that both sides make the same values."""

from __future__ import annotations

import json

import torch

from tools.bench import loss


def test_memory_sees_what_was_there_and_is_gone():
    memory = loss.Memory(torch.device("cpu"))
    memory.start()
    # Over 32 MiB each: glibc may put less into memory that is resident already, where earlier tests have freed it.
    held = torch.ones(10 << 20)  # 40 MiB
    torch.ones(16 << 20)
    peak = memory.peak() / 2**20
    assert 98 <= peak <= 118, "40 MiB are held and 64 MiB are freed"
    memory.reset()
    assert 38 <= memory.peak() / 2**20 <= 54
    del held


def test_both_make_the_same_values(tmp_path):
    file = tmp_path / "figures.json"
    small = ["--tokens", "40", "--vocab", "3000", "--hidden", "16", "--turns", "1", "--device", "cpu"]
    loss.main([*small, "--json", str(file)])
    found = json.loads(file.read_text())
    assert set(found) == {"entropy gradient: False", "entropy gradient: True"}
    for sides in found.values():
        assert 0 < max(sides["fusionrl"][name] for name in loss.ERRORS) < 1e-4
        assert sides["plain"]["s / plain"] == 1
