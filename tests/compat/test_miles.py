"""Functions of miles' hubs, against a scripted HTTP engine: what their tools and agents are told, and every token."""

import asyncio
import base64
import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from fusionrl.compat.slime.api import misc, rollouts
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.generate_state import GenerateState
from fusionrl.rollout.miles_inputs import GenerateFnInput, generate_function
from fusionrl.rollout.sglang_rollout import sampling_params
from tests.rollout.conftest import folder  # noqa: F401
from tests.rollout.engine import Engine, Turn, call, check_sample, response

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
MESSAGES = [{"role": "user", "content": "Is it wet?"}]
FILE = """
import json, urllib.request
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn

tool_specs = [{"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}}}}}]

async def execute_tool(name, params):
    return f"{name} of {params['town']}: rain"

async def run(base_url, prompt, request_kwargs, metadata, **kwargs):
    import asyncio
    return await asyncio.to_thread(_ask, base_url, prompt, request_kwargs, metadata)

def _ask(base_url, prompt, request_kwargs, metadata):
    body = json.dumps({"model": "m", "messages": prompt, **request_kwargs}).encode()
    request = urllib.request.Request(base_url + "/v1/chat/completions", body, {"Authorization": "Bearer EMPTY"})
    said = json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
    return {"reward": 0.5, "said": said, "mine": metadata["mine"] + 1, "asked": sorted(request_kwargs)}

async def silent(base_url, prompt, **kwargs):
    return None

async def broken(base_url, prompt, **kwargs):
    raise RuntimeError("no container")
"""


@pytest.fixture
def play(folder: str, tmp_path: Path) -> Any:  # noqa: F811
    """play(hub function, [turn, …], setting=value) -> (its sample, engine)."""
    file = tmp_path / "hooks.py"
    file.write_text(FILE)

    def start(name: str, turns: list[str], **settings: str | int) -> tuple[Sample, Engine]:
        values = {"hf_checkpoint": folder, "rollout_max_response_len": 2000, "rollout_max_context_len": 6000}
        args = Config.from_flat(values | {"rm_type": "exact", "apply_chat_template": True}).to_args()
        for key, value in settings.items():
            setattr(args, key, value.replace("FILE", str(file)) if isinstance(value, str) else value)
        engine = Engine(load_tokenizer(folder), [Turn(text) for text in turns])
        sample = Sample(index=7, prompt="Is it wet?", label="No.", metadata={"mine": 1}, messages=MESSAGES)
        generate = generate_function(f"miles.rollout.generate_hub.{name}.generate")
        made = engine.serve(args, lambda: generate(args, sample, sampling_params(args), evaluation=False))
        assert made is sample
        return sample, engine

    return start


@needs_sglang
def test_turns_with_tools_of_a_list_and_a_function(play: Any) -> None:
    settings = {
        "generate_tool_specs_path": "FILE:tool_specs",
        "generate_execute_tool_function_path": "FILE:execute_tool",
    }
    settings["generate_tool_call_parser"] = "qwen25"
    sample, engine = play("multi_turn", [call("weather", town="Rome"), "Yes."], **settings)
    between = [engine.tokenizer.decode(tokens) for tokens in check_sample(sample, engine.exchanges)]
    assert between == [response("weather of Rome: rain"), ""]
    assert '"name": "weather"' in engine.tokenizer.decode(engine.exchanges[0].asked["input_ids"])
    sample, engine = play("multi_turn", [call("weather", town="Rome")] * 2, **settings, generate_max_turns=2)
    assert len(engine.exchanges) == 2 and sample.status == Sample.Status.TRUNCATED
    with pytest.raises(
        ValueError, match="generate_tool_specs_path is not given: write it into .* --custom-config-path"
    ):
        play("multi_turn", [])


def test_an_agent_s_function_gets_an_address_that_needs_no_key(play: Any) -> None:
    sample, engine = play("agentic_tool_call", ["It is."], custom_agent_function_path="FILE:run")
    check_sample(sample, engine.exchanges)
    assert {"reward": 0.5, "said": "It is.", "mine": 2}.items() <= sample.metadata.items()
    assert sample.metadata["asked"] == ["max_tokens", "temperature", "top_p"]
    assert sample.reward is None, "the run's reward function scores it"


def test_an_agent_that_asks_for_nothing_and_one_that_raises(play: Any) -> None:
    sample, _ = play("agentic_tool_call", [], custom_agent_function_path="FILE:silent")
    assert sample.status == Sample.Status.FAILED
    kept = rollouts.check_no_aborted(Namespace(), [Sample(status=Sample.Status.COMPLETED), sample])
    assert (kept.keep, kept.reason) == (False, "group_has_aborted")
    assert rollouts.check_no_aborted(Namespace(), [Sample(status=Sample.Status.TRUNCATED)]).keep
    with pytest.raises(HookError, match=r"custom_agent_function_path .*:broken: RuntimeError: no container"):
        play("agentic_tool_call", [], custom_agent_function_path="FILE:broken")
    with pytest.raises(ValueError, match="custom_agent_function_path is not given"):
        play("agentic_tool_call", [])


def test_one_turn_and_one_of_random_length(play: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    _, engine = play("single_turn", ["Yes."])
    assert engine.exchanges[0].asked["sampling_params"]["max_new_tokens"] == 2000

    async def generate(args: Namespace, sample: Sample, params: dict[str, Any]) -> Sample:
        asked.append(params)
        return sample

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("fusionrl.rollout.sglang_rollout.generate", generate)
    given = {"max_new_tokens": 5, "top_p": 1.0}
    asyncio.run(rollouts.generate_with_random_osl(Namespace(), Sample(), given))
    assert 32 << 10 <= asked[0].pop("max_new_tokens") < 64 << 10 and given["max_new_tokens"] == 5
    assert asked == [{"ignore_eos": True, "top_p": 1.0}]


def test_settings_of_an_evaluation_set(tmp_path: Path) -> None:
    args = Namespace(eval_temperature=None, rollout_temperature=0.7, eval_top_k=3, rollout_top_k=-1)
    specs = {name: misc.DATASET_RUNTIME_SPECS[name] for name in ("temperature", "top_k", "top_p", "stop")}
    found: dict[str, Any] = {"stop": None}
    misc._apply_dataset_field_overrides(args, found, {"top_k": 9, "stop": ["x"]}, specs)
    assert found == {"temperature": 0.7, "top_k": 9, "top_p": None, "stop": None}
    (tmp_path / "sets.yaml").write_text("a: ü")
    text = "base64:" + base64.b64encode("a: ü".encode()).decode()
    assert misc.resolve_file_arg(text) == misc.resolve_file_arg(str(tmp_path / "sets.yaml")) == "a: ü"


def test_an_input_has_the_flags_of_its_state(folder: str) -> None:  # noqa: F811
    args = Config.from_flat({"hf_checkpoint": folder}).to_args()
    given = GenerateFnInput(GenerateState(args), Sample(), {}, evaluation=False)
    assert given.args is args
    assert rollouts.build_chat_request_kwargs({"stop": None, "top_p": 0.5, "top_k": 1}) == {"top_p": 0.5}
