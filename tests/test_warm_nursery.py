"""The tests' own nursery: a worker that outlives the one that started it gets another, whatever its tests have set."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fusionrl.base.nursery import Branch, Order
from fusionrl.runtime.nursery_order import engine_branch
from tests.warm_nursery import SharedNursery, model_in
from tests.warm_start import WARM_VARIABLE


def test_whoever_finds_it_dead_starts_a_new_one(tmp_path: Path) -> None:
    def order_of(home: Path, key: str) -> Order:
        return Order(key, [Branch(str(home / name), ["json"], "json:dumps") for name in ("one", "two")])

    workers = [SharedNursery(tmp_path, os.environ, order_of) for _ in range(2)]
    try:
        first = workers[0].variables()
        assert workers[1].variables() == first
        workers[0].close()
        second = workers[1].variables()
        assert second != first and workers[1].variables() == second
        assert not Path(first[WARM_VARIABLE]).exists() and Path(second[WARM_VARIABLE], "one").is_socket()
    finally:
        for worker in workers:
            worker.close()
    assert not Path(second[WARM_VARIABLE]).exists()


def test_what_a_test_has_set_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch is told the variables that its environment lacks; this process may have them from a test by then."""
    before = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told: list[dict[str, str]] = []

    def order_of(home: Path, key: str) -> Order:
        branch = engine_branch(model_in(home), home)
        told.append(branch.environment)
        return Order(key, [replace(branch, modules=["json"], function="json:dumps")])

    nursery = SharedNursery(tmp_path, before, order_of)
    try:
        nursery.variables()
    finally:
        nursery.close()
    assert told[0]["GLOO_SOCKET_IFNAME"] == "lo" == os.environ["GLOO_SOCKET_IFNAME"]
