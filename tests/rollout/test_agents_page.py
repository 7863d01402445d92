"""docs/guides/agents.md: its files run as they stand and print what it shows."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl import plugin_api
from fusionrl.config.config import Config
from fusionrl.config.hooks import check_hook, load_function
from fusionrl.data.sample import Sample
from fusionrl.rollout.sessions import generate
from fusionrl.rollout.sglang_rollout import generate_and_rm, sampling_params
from tests.rollout.engine import Engine, Turn, check_sample
from tests.rollout.test_agent import call, folder  # noqa: F401
from tests.tiny_model import make_byte_tokenizer

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
def play(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Sample, Engine]]:
    """play("my_generate.py", [turn, …], flag=value) -> (the scored sample, engine), as a rollout calls them."""
    model = str(tmp_path_factory.mktemp("model"))
    make_byte_tokenizer(1 << 16).save_pretrained(model)

    def start(name: str, turns: list[Turn], **changes: Any) -> tuple[Sample, Engine]:
        values = {
            "hf_checkpoint": model,
            "apply_chat_template": True,
            "rm_type": "last_number",
            "rollout_max_response_len": 128,
            "rollout_max_context_len": 512,
            "custom_generate_function_path": f"{task / name}:generate",
            "rollout_sample_hook_path": [f"{task / 'my_generate.py'}:show_mask"],
        }
        for field in ("custom_generate_function_path", "rollout_sample_hook_path"):
            for path in [values[field]] if isinstance(values[field], str) else values[field]:
                assert check_hook(field, path) is None
        args = Config.from_flat(values | changes).to_args(rollout_id=0)
        tokenizer = plugin_api.load_tokenizer(model)
        prompt = tokenizer.apply_chat_template(ROW["prompt"], tokenize=False, add_generation_prompt=True)
        sample = Sample(index=0, prompt=prompt, messages=ROW["prompt"], label=ROW["label"])
        engine = Engine(tokenizer, list(turns))

        async def use() -> Any:
            args.semaphore = asyncio.Semaphore(1)
            return await generate_and_rm(args, sample, sampling_params(args))

        return engine.serve(args, use), engine

    return start


def test_the_calculator(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each token's mask, log-prob and version, the reward, and what is printed."""
    sample, engine = play("my_generate.py", [ASKS, ANSWERS])
    between = [engine.tokenizer.decode(tokens) for tokens in check_sample(sample, engine.exchanges)]
    assert between == ["<result>84</result>\n", ""]
    assert capsys.readouterr().out == SHOWN
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 1.0)
    assert sample.response == "I calculate <calc>12 * 7</calc><result>84</result>\nThe answer is 84."
    assert engine.exchanges[0].asked["sampling_params"]["stop"] == ["</calc>"]


def test_requests_of_its_own(play: Any) -> None:
    sample, engine = play("by_hand.py", [ANSWERS])
    assert check_sample(sample, engine.exchanges) == [[]]
    assert (sample.response, sample.status, sample.reward) == (ANSWERS.text, Sample.Status.COMPLETED, 1.0)


def test_room_for_one_turn_alone(play: Any) -> None:
    """What the page says of a response without --rollout-max-context-len."""
    sample, engine = play("my_generate.py", [ASKS], rollout_max_context_len=None, rollout_max_response_len=40)
    assert len(engine.exchanges) == 1 and sample.status == Sample.Status.TRUNCATED
    assert sample.response == ASKS.text, "nothing of the result was appended"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 * 7", "84"),
        ("1 / 0", "error: division by zero"),
        ("__import__('os')", "error: only numbers"),
        ("2 ** 9", "error: only numbers"),
        ("(" * 300 + "1" + ")" * 300, "error: "),
    ],
)
def test_the_tool(task: Path, text: str, value: str) -> None:
    found = load_function(f"{task / 'calc_tool.py'}:calculate")(text)
    assert found == value or (value.startswith("error") and found.startswith(value))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_the_agent_of_the_page(tmp_path: Path, folder: Any) -> None:  # noqa: F811
    (source,) = re.findall(r"```python\n# my_agent.py\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "my_agent.py"
    file.write_text(source)
    assert check_hook("agent_path", f"{file}:agent") is None
    flags = {"agent_path": f"{file}:agent", "hf_checkpoint": folder, "rollout_max_response_len": 512}
    args = Config.from_flat({**flags, "rollout_max_context_len": 4096, "tool_call_parser": "qwen25"}).to_args()
    sample = Sample(prompt="What is 12 * 7?", label="84", metadata={"question": "What is 12 * 7?"})
    engine = Engine(plugin_api.load_tokenizer(folder), [Turn(call("multiply", a=12, b=7)), Turn("It is 84.")])
    made = engine.serve(args, lambda: generate(args, sample, sampling_params(args)))
    assert made is sample and sample.reward == 1.0
    assert "84\n</tool_response>" in engine.tokenizer.decode(check_sample(sample, engine.exchanges)[0])
