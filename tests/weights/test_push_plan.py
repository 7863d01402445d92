"""The plan of a weight push: who feeds whom, and what travels together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusionrl.config.model_shape import ModelShape, shape_from_hf_config
from fusionrl.weights.families import hf_shapes
from fusionrl.weights.plan import EngineTarget, buckets, plan_feeds
from tests.trainer import hf_models


def target(index: int, bundles: tuple[int, ...], node: str = "a") -> EngineTarget:
    return EngineTarget(index, None, node, bundles)


def test_on_gpus_an_engine_rank_reads_from_its_own_device() -> None:
    targets = [target(0, (0, 1)), target(1, (2, 3))]
    feeds = plan_feeds(targets, trainer_bundles=[3, 2, 1, 0], trainer_nodes=["a"] * 4, device="cuda")
    assert [feed.senders for feed in feeds] == [(3, 2), (1, 0)]
    assert [feed.leader for feed in feeds] == [3, 1]
    assert not any(feed.by_value for feed in feeds)


def test_an_engine_on_a_device_without_a_trainer_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--update-weight-transport ipc: engine 1 has devices \[2\] without a trainer"
    ):
        plan_feeds([target(0, (0,)), target(1, (1, 2))], [0, 1], ["a", "a"], "cuda")


def test_on_a_cpu_the_engines_of_a_node_are_dealt_out_over_its_ranks() -> None:
    targets = [target(i, (i, i + 10), "b") for i in range(4)]
    feeds = plan_feeds(targets, [0, 1, 2], ["a", "b", "b"], "cpu")
    assert [feed.leader for feed in feeds] == [1, 2, 1, 2]
    assert all(feed.senders == (feed.leader,) * 2 and not feed.by_value for feed in feeds)


def test_an_engine_on_a_node_without_trainers_gets_its_weights_by_value() -> None:
    near, far = plan_feeds([target(0, (0,), "a"), target(1, (1,), "far")], [0, 1], ["a", "a"], "cpu")
    assert not near.by_value
    assert far.by_value
    assert far.leader in (0, 1)


DTYPES = (torch.float32, torch.bfloat16)


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from(DTYPES)), max_size=25), st.integers(1, 400))
def test_buckets(sizes: list[tuple[int, torch.dtype]], max_bytes: int) -> None:
    tensors = [(str(i), torch.zeros(n, dtype=dtype)) for i, (n, dtype) in enumerate(sizes)]
    made = list(buckets(iter(tensors), max_bytes))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in tensors]
    for bucket in made:
        total = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        assert bucket
        assert len(bucket) == 1 or total <= max_bytes
        for i, (_, tensor) in enumerate(bucket):  # it begins where its values may
            assert sum(before.nbytes for _, before in bucket[:i]) % tensor.element_size() == 0
    # No two neighbours could have been one.
    for left, right in itertools.pairwise(made):
        size = sum(tensor.nbytes for _, tensor in left)
        assert size + right[0][1].nbytes > max_bytes or size % right[0][1].element_size()


def test_one_bucket_of_tensors_is_alive_at_a_time() -> None:
    """The next tensor is gathered only when the bucket before has been handed over."""
    gathered: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            gathered.append(i)
            yield str(i), torch.zeros(10)

    made = buckets(tensors(), max_bytes=80)
    next(made)
    assert gathered == [0, 1, 2]


@pytest.mark.parametrize("limit", range(1, 400, 7))
def test_what_an_engine_joins_comes_in_one_bucket(limit: int) -> None:
    """SGLang drops a q_a_proj whose kv_a_proj_with_mqa comes with another request."""
    shape = hf_models_shape("deepseek_v3")
    tensors = [(name, torch.zeros(sizes)) for name, sizes in hf_shapes(shape).items()]
    made = list(buckets(iter(tensors), limit * 64))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in tensors]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        pair = {prefix + "q_a_proj.weight", prefix + "kv_a_proj_with_mqa.weight"}
        assert sum(bool(pair & {name for name, _ in bucket}) for bucket in made) == 1


def hf_models_shape(family: str) -> ModelShape:
    return shape_from_hf_config(json.loads(hf_models.config_of(family, False).to_json_string(use_diff=False)))
