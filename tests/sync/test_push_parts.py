"""Pieces of a push that need no process: conversion in a bucket's place, the order of sends, waiting for calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from fusionrl.models.families.rules import Rule
from fusionrl.plan.push import Bucket, PushTensor
from fusionrl.sync.calls import Threaded, wait_all
from fusionrl.sync.gather import convert_in_place, views_of
from fusionrl.sync.group import create_group_store
from fusionrl.sync.turns import PushStopped, Turns


def halves(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices become bytes and a scale; vectors stay as they are."""
    for name, tensor in tensors:
        if tensor.dim() == 1:
            yield name, tensor
            continue
        scale = tensor.float().abs().amax() / 100
        yield name, (tensor.float() / scale).round().to(torch.int8)
        yield name + "_scale", scale.reshape(1)


def test_a_bucket_is_converted_where_it_lies() -> None:
    """Each tensor aligned to its values, none overwritten before it is read, and it is known which tensor it was."""
    sizes = [(3,), (5, 7), (9,), (11, 3)]
    rules = [Rule(f"m{i}", {f"t{i}": size}) for i, size in enumerate(sizes)]
    tensors = tuple(PushTensor(f"t{i}", size, "bfloat16", rules[i], 0, 0) for i, size in enumerate(sizes))
    bucket = Bucket(0, (0,), (0,), tensors)
    flat = torch.zeros(bucket.nbytes + 40, dtype=torch.uint8)
    values = [torch.randn(size, generator=torch.Generator().manual_seed(i)).bfloat16() for i, size in enumerate(sizes)]
    for (_, _, view), value in zip(views_of(bucket, flat), values, strict=True):
        view.copy_(value)
    found = convert_in_place(views_of(bucket, flat), flat, halves)
    want = dict(halves((f"t{i}", value) for i, value in enumerate(values)))
    assert {name for _, name, _ in found} == {"t0", "t1", "t1_scale", "t2", "t3", "t3_scale"}
    end = 0
    for tensor, name, view in found:
        assert tensor.name == name.removesuffix("_scale")
        assert torch.equal(view, want[name]), name
        offset = view.data_ptr() - flat.data_ptr()
        assert offset == end, "one follows the other"
        assert offset % view.element_size() == 0
        end = offset + view.nbytes
    assert end < bucket.nbytes


@pytest.fixture
def store() -> dist.Store:
    return create_group_store("127.0.0.1", 30.0)


def test_a_step_waits_for_those_before_it(store: dist.Store) -> None:
    order: list[int] = []

    def go(number: int) -> None:
        turns = Turns(dist.TCPStore("127.0.0.1", store.port, is_master=False), "p", 30.0)  # type: ignore[attr-defined]
        turns.wait(range(number - 1, number) if number else ())
        order.append(number)
        turns.done(number)

    threads = [threading.Thread(target=go, args=[number]) for number in (3, 2, 1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(20)
    assert order == [0, 1, 2, 3]


def test_a_failure_ends_every_wait_and_is_told(store: dist.Store) -> None:
    first, second = Turns(store, "p", 30.0), Turns(store, "p", 30.0)
    first.fail(RuntimeError("engine 3 is dead"))
    with pytest.raises(PushStopped, match="engine 3 is dead"):
        second.wait([0])
    Turns(store, "the next one", 30.0).wait([])
    with pytest.raises(RuntimeError, match=r"no turn within 0 s \(--update-weight-timeout-s\)"):
        Turns(store, "another", 0.05).wait([0])


class Engine:
    def good(self, value: int) -> int:
        return value + 1

    def bad(self) -> None:
        raise ValueError("no such weight")


def test_the_first_failure_ends_the_wait_for_the_others() -> None:
    engine = Threaded(Engine())
    assert wait_all([("a", engine.good.remote(1)), ("b", engine.good.remote(2))], 10.0) == [2, 3]
    never: Future[None] = Future()
    with pytest.raises(RuntimeError, match="engine 1: no such weight"):
        wait_all([("engine 0", never), ("engine 1", engine.bad.remote())], 10.0)
    with pytest.raises(RuntimeError, match=r"engine 0: no end after 0 s \(--update-weight-timeout-s\)"):
        wait_all([("engine 0", never)], 0.05)
