"""Functions with slime's imports and idioms, against an HTTP engine: any thread, any event loop."""

import gc
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fusionrl.buffer.data_source import RolloutDataSource
from fusionrl.compat.slime.api.http import run_app_in_thread
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, load_function
from fusionrl.data.sample import Sample
from fusionrl.rollout.sglang_rollout import generate_rollout
from fusionrl.rollout.types import RolloutAborted
from tests.rollout.engine import EOS

FILE = str(Path(__file__).with_name("slime_rollouts.py"))


@pytest.fixture
def engine_url(tokenizer: Any) -> Iterator[str]:
    """The address of an engine that says `ok` to whatever it is asked, and knows of aborts."""

    def said(ids: list[int]) -> dict[str, Any]:
        text = "okay" if "!" in tokenizer.decode(ids) else "ok"
        tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        meta = {"id": "0", "finish_reason": {"type": "stop", "matched": EOS}, "weight_version": "4"}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in tokens]
        return {"text": text, "output_ids": tokens, "meta_info": meta}

    async def answer(request: web.Request) -> web.Response:
        asked = (await request.json())["input_ids"]  # of one request, or of several that the client sends together
        return web.json_response([said(ids) for ids in asked] if isinstance(asked[0], list) else said(asked))

    async def abort(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/generate", answer), web.post("/abort_request", abort)])
    handle = run_app_in_thread(app, host="127.0.0.1")
    yield f"http://127.0.0.1:{handle.port}"
    handle.stop()


@pytest.fixture
def start(tiny_model: Path, write_rows: Any, engine_url: str) -> Any:
    """start(flag=value, …) -> (args, data source)."""
    data = write_rows([{"input": f"p{i}", "label": str(i)} for i in range(20)])

    def make(**changes: Any) -> tuple[Any, RolloutDataSource]:
        values = {"hf_checkpoint": str(tiny_model), "prompt_data": str(data), "custom_rm_path": f"{FILE}:reward"}
        sizes = {"rollout_batch_size": 2, "over_sampling_batch_size": 4, "n_samples_per_prompt": 2}
        run = {"engine_urls": [engine_url], "router_url": engine_url, "api_key": None, "vocab_size": 512}
        config = Config.from_flat(values | sizes | {"rollout_max_response_len": 8} | changes)
        args = config.to_args(abort_event=threading.Event(), **run)
        return args, RolloutDataSource(args)

    return make


@pytest.mark.parametrize("name", ["by_asyncio_run", "by_the_process_loop", "in_a_thread", "one_by_one"])
def test_from_any_thread_and_loop(start: Any, name: str) -> None:
    function = load_function(f"{FILE}:{name}")
    for rollout_id in range(2):  # a state that the module kept goes on
        args, source = start()
        output = function(args, rollout_id, source)
        samples = [sample for group in getattr(output, "samples", output) for sample in group]
        assert samples
        for sample in samples:
            assert isinstance(sample, Sample) and isinstance(vars(sample)["loss_mask"], np.ndarray)
            assert sample.response.startswith("ok") and sample.response_length == 3
            assert sample.reward in (0.5, len(sample.tokens))


def test_a_copy_of_slime_s_loop(start: Any) -> None:
    args, source = start(partial_rollout=True)
    groups = load_function(f"{FILE}:with_abort")(args, 0, source)
    assert [[s.status for s in group] for group in groups] == [[Sample.Status.COMPLETED] * 2] * 2
    assert len(source.buffer) <= 2, "the two groups beyond the batch, if they had not finished"


def test_the_idioms_of_lists_in_a_generate_function(start: Any) -> None:
    args, source = start(custom_generate_function_path=f"{FILE}:lists")
    for sample in (sample for group in generate_rollout(args, 0, source).samples for sample in group):
        assert sample.response == "okay", "the prompt that the function wrote was asked for"
        assert vars(sample)["tokens"].dtype == np.int32 and sample.tokens[-1] == 7
        assert sample.loss_mask == [1] * (sample.response_length - 1) + [0]
        assert len(sample.weight_versions) == sample.response_length  # type: ignore[arg-type]


def test_a_state_of_an_earlier_rollout_is_not_aborted(start: Any) -> None:
    args, source = start()
    generate_rollout(args, 0, source)
    state = load_function("slime.rollout.sglang_rollout.GenerateState")(args)
    assert not state.aborted
    other, more = start()
    generate_rollout(other, 1, more)
    assert not state.aborted


def test_connections_end_with_their_loop(start: Any) -> None:
    args, source = start()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        unraisable: list[Any] = []
        hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
        load_function(f"{FILE}:by_asyncio_run")(args, 0, source)
        gc.collect()
        sys.unraisablehook = hook
    assert not unraisable and not [one for one in said if "Unclosed" in str(one.message)]


FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def test_the_fully_asynchronous_worker(start: Any) -> None:
    """Groups stay under way between rollouts: none is lost, none comes twice, and no prompt is drawn meanwhile."""
    function = load_function(FULLY_ASYNC)
    args, source = start(sglang_server_concurrency=8)
    seen: list[int] = []
    for rollout_id in range(6):
        args, _ = start(sglang_server_concurrency=8)
        groups = function(args, rollout_id, source)
        assert len(groups) == 2 and all(sample.reward == len(sample.tokens) for group in groups for sample in group)
        seen += [group[0].group_index for group in groups]
        drawn = source.num_groups
        time.sleep(0.05)
        assert source.num_groups == drawn
    assert len(set(seen)) == len(seen) == 12
    worker = function.__globals__["_worker"]
    deadline = time.monotonic() + 10.0
    while worker._flying and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting = [group[0].group_index for _, group in list(worker.output_queue.queue)]
    assert sorted([*seen, *waiting]) == list(range(source.num_groups)), "a group was lost"
    assert sorted(seen)[-1] <= 12 + 2 * 4, "four groups in flight, and four that wait, at most"
    with pytest.raises(ValueError, match="does not evaluate; give --eval-function-path"):
        function(args, 6, source, evaluation=True)


def test_failing_and_aborted_groups_of_a_fully_asynchronous_rollout(start: Any) -> None:
    args, source = start(custom_generate_function_path=f"{FILE}:fails", sglang_server_concurrency=8)
    with pytest.raises(HookError, match="no luck"):
        load_function(FULLY_ASYNC)(args, 0, source)
    args, source = start(custom_generate_function_path=f"{FILE}:aborted_at_first", sglang_server_concurrency=8)
    groups = load_function(FULLY_ASYNC)(args, 0, source)
    assert {sample.status for group in groups for sample in group} == {Sample.Status.COMPLETED}
    args.abort_event.set()
    with pytest.raises(RolloutAborted):
        load_function(FULLY_ASYNC)(args, 1, source)
