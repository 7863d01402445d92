"""The border to users' functions: what they find in `args`, and how often it is built."""

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.buffer.collect import EngineEndpoints, HookBorder
from fusionrl.config.config import Config
from fusionrl.engines.http import ROUTER_URLS
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import make_plan

URLS = ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]


@pytest.fixture
def border(tiny_model: Path, tmp_path: Path) -> HookBorder:
    flags = {"hf_checkpoint": str(tiny_model), "rollout_batch_size": 4, "rm_type": "exact"}
    config = Config.from_flat(flags)
    plan = make_plan(config, read_model_shape(tiny_model), device="cpu", num_prompts=4)
    made = HookBorder(config, plan, tmp_path, threading.Event())
    made.endpoints = EngineEndpoints("http://10.0.0.9:31000", tuple(URLS), "key", teacher_urls=("http://t:1",))
    return made


def test_hooks_find_the_flags_and_what_the_run_adds(border: HookBorder, tmp_path: Path) -> None:
    args = border.args()
    assert (args.rollout_batch_size, args.rm_type, args.custom_rm_path) == (4, "exact", None)
    assert (args.sglang_router_ip, args.sglang_router_port) == ("10.0.0.9", 31000)
    assert (args.router_url, args.engine_urls, args.api_key) == ("http://10.0.0.9:31000", URLS, "key")
    assert (args.rm_urls, args.teacher_urls, args.rollout_global_dataset) == ([], ["http://t:1"], False)
    assert (args.save, args.load, args.run_dir) == (str(tmp_path / "checkpoints"), None, str(tmp_path))
    assert (args.vocab_size > 0, args.num_experts, args.routed_experts_size) == (True, None, None)
    assert (args.device, args.precision) == ("cpu", "fp32"), "what was open has the plan's answer"
    assert isinstance(args.abort_event, threading.Event)


def test_it_is_built_once_and_each_hook_has_a_copy(border: HookBorder, monkeypatch: Any) -> None:
    built = []
    to_args = Config.to_args
    monkeypatch.setattr(Config, "to_args", lambda self, **extra: built.append(1) or to_args(self, **extra))
    one, other = border.args(), border.args()
    one.engine_urls.append("http://nowhere")
    one.rm_type = "math"
    assert (other.engine_urls, other.rm_type) == (URLS, "exact") and len(built) == 1
    assert one.abort_event is other.abort_event
    border.endpoints = EngineEndpoints("http://10.0.0.9:31000", (URLS[1],))
    assert border.args().engine_urls == [URLS[1]] and len(built) == 2
    assert border.policy_urls() == ["http://10.0.0.9:31000", URLS[1]]


def test_what_was_built_for_replaced_engines_is_freed(border: HookBorder, monkeypatch: Any) -> None:
    built, to_args = list[weakref.ref[Any]](), Config.to_args

    def noted(self: Config, **extra: Any) -> Any:
        args = to_args(self, **extra)
        built.append(weakref.ref(args))
        return args

    monkeypatch.setattr(Config, "to_args", noted)
    for number in range(5):
        border.endpoints = EngineEndpoints("http://10.0.0.9:31000", (f"http://10.0.0.1:{number}",))
        border.args()
    assert len(built) == 5 and built[0]() is None and built[-1]() is not None


def test_endpoints_that_come_during_a_build_are_the_next_calls(border: HookBorder, monkeypatch: Any) -> None:
    new, to_args = EngineEndpoints("http://10.0.0.9:31000", (URLS[1],)), Config.to_args
    monkeypatch.setattr(
        Config, "to_args", lambda self, **extra: setattr(border, "endpoints", new) or to_args(self, **extra)
    )
    assert border.args().engine_urls == URLS
    assert border.args().engine_urls == [URLS[1]]


def test_an_evaluation_finds_the_engines_of_its_own_which_get_the_key(border: HookBorder, monkeypatch: Any) -> None:
    assert border.args(is_evaluation=True).engine_urls == URLS, "without them, those that generate"
    own = {"eval_router_url": "http://10.0.0.9:31001", "eval_urls": ("http://10.0.0.3:30000",)}
    endpoints = EngineEndpoints("http://10.0.0.9:31000", tuple(URLS), "key", **own)
    for name in (ROUTER_KEY, ROUTER_URLS):
        monkeypatch.setenv(name, "")
    endpoints.export()
    assert {*URLS, "http://10.0.0.9:31001", "http://10.0.0.3:30000"} <= set(os.environ[ROUTER_URLS].split())
    border.endpoints = endpoints
    args = border.args(is_evaluation=True)
    assert (args.router_url, args.engine_urls) == ("http://10.0.0.9:31001", ["http://10.0.0.3:30000"])
    assert (args.sglang_router_port, args.rollout_num_engines) == (31001, 1)
    assert (border.args().router_url, border.args().engine_urls) == ("http://10.0.0.9:31000", URLS)
