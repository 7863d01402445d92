"""A choice of `tools/push_matrix.py`: real engines and trainer ranks, through the code that a run pushes with."""

import importlib.util
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from fusionrl.engines.http import call
from fusionrl.engines.weight_payload import by_value
from fusionrl.weights.verify import WeightMismatch
from tests.warm_nursery import SharedNursery
from tests.warm_start import WarmStart
from tools import push_matrix
from tools.push_matrix import EXECUTORS, LAYOUTS, Bench, bench

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
FIRST = "PP 2 · VPP 2"
ENGINE = 2  # of two tensor-parallel ranks
NUM_TENSORS = 2 * (3 + 4 * 9)  # on each rank embedding, norm and head, and nine of each layer
NUM_TOKENS = 250  # a push and what is asked after it take a part of them


@pytest.fixture(scope="module")
def stack(warm_nursery: SharedNursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A mixture of experts behind an engine of two ranks, without a prefix cache as `in_place` has it."""
    ray.shutdown()  # of the files of the group "ray"
    with (
        warm_nursery.applied(),
        patch.object(push_matrix, "EarlyStart", WarmStart),
        push_matrix.cluster("Qwen3MoeForCausalLM"),
        bench("qwen3_moe", tmp_path_factory.mktemp("push"), [ENGINE], {"disable_radix_cache": True}) as made,
    ):
        made.lay_out(LAYOUTS[FIRST])
        yield made


@pytest.mark.parametrize("layout", [FIRST, "TP 2 · EP 2"])
def test_every_executor_brings_the_weights(stack: Bench, layout: str) -> None:
    """By log-probs against transformers and the trainers, and by checksums against the files and the trainers."""
    stack.lay_out(LAYOUTS[layout])
    for executor in EXECUTORS:
        checked = stack.check(stack.push([ENGINE], executor))
        assert max(checked["transformers"], checked["trainers"]) < push_matrix.BOUND, (executor, checked)
        assert checked["tensors"] == NUM_TENSORS


def test_a_mismatch_names_the_engine_and_the_tensors(stack: Bench) -> None:
    """One value of one expert, off by one bit in the engine, which no log-prob would show."""
    which = stack.push([ENGINE], EXECUTORS[0])
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    tensor = load_file(stack.paths[which] / "model.safetensors")[name]
    tensor.view(torch.int32)[-1, -1] ^= 1
    handle = stack.engines[ENGINE]
    _load(handle, name, tensor)
    wrong = r"1 tensors differ: model\.layers\.2\.mlp\.experts\.w2_weight$"
    with pytest.raises(WeightMismatch, match=f"^engine 2, rank 1: {wrong}"):
        stack.verify([ENGINE])
    assert stack.verify([ENGINE], is_exact=False)["sync/verify_tensors"] == NUM_TENSORS - 1
    _load(handle, name, 100 * tensor)
    with pytest.raises(
        WeightMismatch,
        match=rf"engine 2: .* log-probs differ .* more than --verify-tolerance 1\.0e-05; engine 2, rank 0: {wrong}",
    ):
        stack.verify([ENGINE], is_exact=False)
    with pytest.raises(WeightMismatch, match=rf"stamped version \[{stack.version}\] after a push of version 99"):
        stack.verify([ENGINE], is_exact=False, version=99)


def _load(handle: Any, name: str, tensor: torch.Tensor) -> None:
    """Change one tensor of the engine by hand; the version stays."""
    ray.get(handle.begin_weight_update.remote())
    payload = [by_value([(name, tensor)])] * 2
    ray.get(handle.update_weights_from_tensor.remote(payload, load_format=None, version=None, flush_cache=True))
    ray.get(handle.end_weight_update.remote())


def test_in_place_nothing_is_answered_from_what_was_cached(stack: Bench) -> None:
    """A request that runs on keeps its old keys and values, and says so; the same prompts asked since see none of them,
    neither while it runs nor when its own have been given back."""
    old = stack.push([ENGINE], EXECUTORS[0])
    before = stack.version
    running: dict[str, Any] = {}

    def run_on() -> None:
        params = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
        payload = {"input_ids": push_matrix.PROMPTS[-1], "sampling_params": params, "return_logprob": True}
        running.update(call("POST", stack.urls[ENGINE] + "/generate", payload, api_key=None, timeout_s=300.0))

    thread = threading.Thread(target=run_on)
    thread.start()
    while not sum(load["num_running_reqs"] for load in call("GET", stack.urls[ENGINE] + "/v1/loads")["loads"]):
        assert thread.is_alive()
    new = stack.push([ENGINE], EXECUTORS[0], pause_mode="in_place")
    assert new != old and thread.is_alive()
    for is_over in (False, True):
        if is_over:
            thread.join()
        tokens, log_probs, versions = stack.ask(ENGINE)
        assert is_over or thread.is_alive()
        assert versions == {str(stack.version)}
        np.testing.assert_allclose(log_probs, stack.log_probs(new, tokens), atol=push_matrix.BOUND)
        assert np.abs(log_probs - stack.log_probs(old, tokens)).mean() > 0.1
    spans = running["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [str(before), str(stack.version)]
    assert len(running["output_ids"]) == NUM_TOKENS
