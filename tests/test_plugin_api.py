"""The names that slime's users import, and what they mean."""

import argparse
import asyncio
import copy
import threading
from pathlib import Path
from typing import Any

import pytest

from fusionrl import plugin_api
from fusionrl.base.environment import ROUTER_KEY
from fusionrl.config.config import Config
from fusionrl.engines.http import ROUTER_URLS
from fusionrl.plugin_api import GenerateState, Sample, post, run


def test_all_names_are_there() -> None:
    assert all(getattr(plugin_api, name) is not None for name in plugin_api.__all__)
    assert Sample.Status.ABORTED.value == "aborted"
    assert plugin_api.math_dapo_utils.compute_score is plugin_api.compute_score


def test_post_tries_again(json_server: Any) -> None:
    json_server.answers = [(500, ""), (503, ""), (200, {"got": 1})]
    assert asyncio.run(post(json_server.url, {"a": 1})) == {"got": 1}
    assert json_server.asked == [({"a": 1}, None)] * 3
    json_server.answers = [(400, "why")]
    with pytest.raises(RuntimeError, match=r"answered 400: .*why"):
        asyncio.run(post(json_server.url, {}))
    assert len(json_server.asked) == 4
    json_server.answers = [(500, "down")] * 2
    with pytest.raises(RuntimeError, match=r"answered 500.*\(2 tries\)"):
        asyncio.run(post(json_server.url, {}, max_retries=2))
    with pytest.raises(RuntimeError, match="did not answer"):
        asyncio.run(post("http://127.0.0.1:9/x", {}, max_retries=1))


def test_the_key_goes_to_the_runs_own_engines_alone(json_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUTER_KEY, "secret")
    monkeypatch.setenv(ROUTER_URLS, f"{json_server.url} http://127.0.0.1:9")
    asyncio.run(post(f"{json_server.url}/generate", {}))
    assert json_server.asked[-1][1] == "Bearer secret"
    for other in ("http://127.0.0.1:9", json_server.url[:-1]):  # the second: a port whose digits begin like this one's
        monkeypatch.setenv(ROUTER_URLS, other)
        asyncio.run(post(f"{json_server.url}/generate", {}))
        assert json_server.asked[-1][1] is None


def test_run_keeps_one_loop() -> None:
    async def where() -> int:
        return id(asyncio.get_running_loop())

    assert run(where()) == run(where())

    async def breaks() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(breaks())


def test_generate_state_is_one_for_a_rollout(tiny_model: Path) -> None:
    config = Config.from_flat({"hf_checkpoint": str(tiny_model), "rollout_max_response_len": 5})
    args = config.to_args(engine_urls=["a", "b"])
    state = GenerateState(args)
    assert GenerateState(args) is state and copy.deepcopy(args).generate_state is state
    assert GenerateState(config.to_args()) is not state
    assert state.tokenizer("x")["input_ids"] and state.sampling_params["max_new_tokens"] == 5
    assert state.semaphore._value == 2 * args.sglang_server_concurrency
    assert not state.aborted
    args.abort_event = threading.Event()
    again = copy.deepcopy(args)
    again.engine_urls.append("c")
    assert again.abort_event is args.abort_event and len(args.engine_urls) == 2
    args.is_stopping = lambda: True
    assert state.aborted


def test_a_response_grows_by_what_the_engine_answers() -> None:
    sample = Sample(tokens=[1, 2])
    args = argparse.Namespace()
    meta_info = {"weight_version": "7", "finish_reason": {"type": "length"}}
    first = {"tokens": [3, 4], "log_probs": [-1.0, -2.0], "trainable": True, "text": "ab"}
    sample.append_response_tokens(args, **first, meta_info=meta_info)
    assert list(sample.weight_versions) == [7, 7] and sample.status == Sample.Status.TRUNCATED  # type: ignore[arg-type]
    sample.append_response_tokens(args, tokens=[5], trainable=False, text="c")
    stop = {"weight_version": "default", "finish_reason": {"type": "stop"}}
    sample.append_response_tokens(args, tokens=[6], log_probs=[-3.0], meta_info=stop, update_terminal_info=False)
    assert sample.status == Sample.Status.TRUNCATED and list(sample.loss_mask) == [1, 1, 0, 1]  # type: ignore[arg-type]
    assert list(sample.weight_versions) == [7, 7, 7, 0] and sample.response == "abc"  # type: ignore[arg-type]
