"""Supervised rows, prompts of RL and sessions render a conversation in one way, under the templates that trl ships."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_conversation_has_one_rendering_or_a_refusal_that_names_the_field() -> None:
    pytest.importorskip("trl")
    command = [sys.executable, "tools/render_conversations.py", "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    words = lines[-1].split()
    assert int(words[0]) >= 200 and int(words[2]) >= 500 and lines[-1].endswith(" 0 with two renderings")
    refusals = [line for line in lines if line.startswith("    ")]
    names = ("does not render", "refuses it (", "as Python prints")
    assert refusals and all(any(name in line for name in names) for line in refusals), refusals
