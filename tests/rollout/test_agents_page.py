"""docs/guides/agents.md: its files run as they stand and print what it shows."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.hooks import check_hook, load_function
from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.sessions import generate
from fusionrl.rollout.sglang_rollout import generate_and_rm
from tests.rollout import engine as scripted
from tests.rollout.engine import Engine, Turn, call, needs

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# my_task/(\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
ROW = json.loads(PAGE.split("```json\n")[1].split("```")[0])
SHOWN = PAGE.split("`logs/buffer.a1.log`:\n\n```\n")[1].split("```")[0]
ASKS, ANSWERS = Turn("I calculate <calc>12 * 7</calc>", end=None), Turn("The answer is 84.")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def play(task: Path, folder: str) -> Callable[..., tuple[Sample, Engine]]:
    """play("my_generate.py", [turn, …], flag=value) -> (the scored sample, engine), as a rollout calls them."""

    def start(name: str, turns: list[Turn | str], **changes: Any) -> tuple[Sample, Engine]:
        path, hook = f"{task / name}:generate", f"{task / 'my_generate.py'}:show_mask"
        assert check_hook("custom_generate_function_path", path) is None
        assert check_hook("rollout_sample_hook_path", hook) is None
        flags: dict[str, Any] = {
            "apply_chat_template": True,
            "rollout_max_response_len": 128,
            "rollout_max_context_len": 512,
        }
        flags |= {"custom_generate_function_path": path, "rollout_sample_hook_path": [hook], "rm_type": "last_number"}
        prompt = load_tokenizer(folder).apply_chat_template(ROW["prompt"], tokenize=False, add_generation_prompt=True)
        sample = Sample(index=0, prompt=prompt, messages=ROW["prompt"], label=ROW["label"])

        async def scored(args: Any, *rest: Any) -> Any:
            args.rollout_id, args.semaphore = 0, asyncio.Semaphore(1)
            return await generate_and_rm(args, *rest)

        return scripted.play(scored, folder, sample, turns, **flags | changes)

    return start


def test_the_calculator(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sample, engine = play("my_generate.py", [ASKS, ANSWERS])
    assert engine.texts(sample) == ["<result>84</result>\n", ""]
    assert capsys.readouterr().out == SHOWN
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 1.0)
    assert sample.response == "I calculate <calc>12 * 7</calc><result>84</result>\nThe answer is 84."
    assert engine.exchanges[0].asked["sampling_params"]["stop"] == ["</calc>"]


def test_requests_of_its_own(play: Any) -> None:
    sample, engine = play("by_hand.py", [ANSWERS])
    assert engine.texts(sample) == [""]
    assert (sample.response, sample.status, sample.reward) == (ANSWERS.text, Sample.Status.COMPLETED, 1.0)


def test_the_tool(task: Path) -> None:
    calculate = load_function(f"{task / 'calc_tool.py'}:calculate")
    assert calculate("12 * 7") == "84"
    for text, told in (
        ("1 / 0", "error: division by zero"),
        ("__import__('os')", "error: only numbers"),
        ("(" * 300 + "1" + ")" * 300, "error: "),
    ):
        assert calculate(text).startswith(told)


@needs("sglang")
def test_the_agent_of_the_page(tmp_path: Path, folder: str) -> None:
    (source,) = re.findall(r"```python\n# my_agent.py\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "my_agent.py"
    file.write_text(source)
    assert check_hook("agent_path", f"{file}:agent") is None
    sample = Sample(prompt="What is 12 * 7?", label="84", metadata={"question": "What is 12 * 7?"})
    turns = [call("multiply", a=12, b=7), "It is 84."]
    flags = {"agent_path": f"{file}:agent", "rollout_max_response_len": 512, "tool_call_parser": "qwen25"}
    made, engine = scripted.play(generate, folder, sample, turns, **flags)
    assert made is sample and sample.reward == 1.0
    assert "84\n</tool_response>" in engine.texts(sample)[0]
