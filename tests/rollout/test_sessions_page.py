"""docs/guides/agents.md: its agent runs as printed, and its generate function too."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.config.hooks import check_hook
from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.sessions import generate
from fusionrl.rollout.sglang_rollout import sampling_params
from tests.rollout.engine import Engine, Turn, check_sample
from tests.rollout.test_agent import call, folder  # noqa: F401

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


def test_the_agent_of_the_page(tmp_path: Path, folder: Any) -> None:  # noqa: F811
    (source,) = re.findall(r"```python\n# my_agent.py\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "my_agent.py"
    file.write_text(source)
    assert check_hook("agent_path", f"{file}:agent") is None
    flags = {"agent_path": f"{file}:agent", "hf_checkpoint": folder, "rollout_max_response_len": 512}
    args = Config.from_flat({**flags, "rollout_max_context_len": 4096, "tool_call_parser": "qwen25"}).to_args()
    sample = Sample(prompt="What is 12 * 7?", label="84", metadata={"question": "What is 12 * 7?"})
    engine = Engine(load_tokenizer(folder), [Turn(call("multiply", a=12, b=7)), Turn("It is 84.")])
    made = engine.serve(args, lambda: generate(args, sample, sampling_params(args)))
    assert made is sample and sample.reward == 1.0
    assert "84\n</tool_response>" in engine.tokenizer.decode(check_sample(sample, engine.exchanges)[0])
