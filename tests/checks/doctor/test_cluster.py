"""`fusionrl doctor --ray-address`: which questions the nodes of a cluster get, and in which order.

Two real nodes of a cluster are in tests/e2e/test_two_nodes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusionrl.checks.doctor.examine import Examined
from fusionrl.checks.doctor.findings import Finding
from fusionrl.checks.doctor.nodes import NodeDoctor
from fusionrl.cli.doctor_nodes import cluster_findings
from fusionrl.config.parser import read_args
from fusionrl.runtime.node_actors import Node

OWN, OTHER = "10.0.0.1", "10.0.0.2"


class _Nodes:
    """Two nodes in this process, of which the first is this machine. A cluster of Ray takes 10 s to start."""

    def __init__(self, asked: list[str], **answers: object) -> None:
        """`answers`: method → answer of the other node; `asked` gets the methods in order."""
        self.nodes = [Node(OWN, "127.0.0.1", True, 1), Node(OTHER, "127.0.0.1", False, 1)]
        self._doctors = {name: NodeDoctor() for name in (OWN, OTHER)}
        self._asked, self._answers = asked, answers

    def __call__(self, *_: object, **__: object) -> _Nodes:
        return self

    def __enter__(self) -> _Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, method: str, *arguments: object) -> Mapping[str, object]:
        return self.ask_each(method, {node.name: arguments for node in self.nodes})

    def ask_each(self, method: str, arguments: Mapping[str, Sequence[object]]) -> Mapping[str, object]:
        self._asked.append(f"{method} of {len(arguments)}")
        if method in ("open_store", "all_reduce"):  # one process is in one group alone
            return dict.fromkeys(arguments, 4711 if method == "open_store" else 0.1)
        return {
            name: self._answers[method]
            if name == OTHER and method in self._answers
            else getattr(self._doctors[name], method)(*given)
            for name, given in arguments.items()
        }


class _Plan:
    """As much of a plan as the checks of nodes read."""

    num_bundles, memory = 2, None


def _findings(
    monkeypatch: pytest.MonkeyPatch, flags: Sequence[str] = (), plan: Any = None, **answers: object
) -> tuple[dict[str, Finding], list[str]]:
    """Findings by check, and the questions to the nodes."""
    asked: list[str] = []
    monkeypatch.setattr("fusionrl.runtime.node_actors.NodeActors", _Nodes(asked, **answers))
    config, errors = read_args(["--ray-address", "10.0.0.1:6379", *flags])
    assert not errors
    return {one.check: one for one in cluster_findings(Examined(config, plan, (), (), "cpu"))}, asked


def test_all_nodes_have_torch_before_they_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = _findings(monkeypatch)
    assert asked[-3:] == ["prepare of 2", "open_store of 1", "all_reduce of 2"]
    assert found["collective"].status == "fact"
    found, asked = _findings(monkeypatch, prepare=RuntimeError("ImportError: libgomp.so.1"))
    assert "libgomp" in found["collective"].fact and asked[-1] == "prepare of 2", "nobody waits for it"


def test_a_folder_that_nobody_gave_is_not_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert "shared" not in _findings(monkeypatch)[0]
    for flags in ([], ["--run-dir", str(tmp_path / "x")]):
        plan = None if flags else _Plan()
        assert _findings(monkeypatch, flags, plan)[0]["shared"].fact == "all 2 nodes see --run-dir"
    assert not list(tmp_path.iterdir()), "the file is gone"


def test_a_folder_without_a_file_of_ours_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node has a /proc of its own, in which nobody can make files."""
    found, _ = _findings(monkeypatch, ["--run-dir", "/proc"])
    assert found["shared"].status == "warning" and found["shared"].fact.startswith("--run-dir /proc: no file can be")


def test_a_clock_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = _findings(monkeypatch, now=TimeoutError("no answer within 120 s"))
    assert found["clock"].status == "warning" and "10.0.0.2 does not tell its time" in found["clock"].fact
    assert asked.count("now of 1") == 1
