"""tools/bench/loss.py: what it measures with, and that both sides make the same values."""

import json
from pathlib import Path

from tests.own_process import run_code
from tools.bench import loss


def test_memory_sees_what_was_there_and_is_gone() -> None:
    """In a process of its own: in this one, memory that earlier tests freed may be resident already."""
    code = (
        "import torch; from tools.bench import loss\n"
        "memory = loss.Memory(torch.device('cpu')); memory.start()\n"
        "held = torch.ones(10 << 20); torch.ones(16 << 20)\n"  # 40 and 64 MiB
        "peak = memory.peak(); memory.reset(); print(peak / 2**20, memory.peak() / 2**20)"
    )
    peak, after = map(float, run_code(code).split())
    assert 98 <= peak <= 118 and 38 <= after <= 54, "40 MiB are held and 64 MiB are freed"


def test_both_make_the_same_values(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    loss.main(f"--tokens 40 --vocab 3000 --hidden 16 --turns 1 --device cpu --json {file}".split())
    found = json.loads(file.read_text())
    assert set(found) == {"entropy gradient: False", "entropy gradient: True"}
    for sides in found.values():
        assert 0 < max(sides["fusionrl"][name] for name in loss.ERRORS) < 1e-4
        assert sides["plain"]["s / plain"] == 1
