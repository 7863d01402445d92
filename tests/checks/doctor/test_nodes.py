"""`fusionrl doctor` on a cluster: each fault that is planted on a node is found, with its node and its cure.

Two real nodes of a cluster are in tests/e2e/test_two_nodes.py.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.checks.doctor import nodes
from fusionrl.checks.doctor.findings import Finding, fact, fault
from fusionrl.checks.doctor.nodes import (
    NodeDoctor,
    NodeReport,
    Order,
    clock_findings,
    device_findings,
    look_findings,
    prepare_findings,
    reach_findings,
    reduce_findings,
)
from fusionrl.checks.doctor.packages import installed_versions
from tests.checks.doctor.test_machine import one

VERSIONS: dict[str, str | None] = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"}
OWN, OTHER, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def _looks(**changes: Any) -> list[Finding]:
    """Findings of two healthy nodes, but for `changes` of the other one's look."""
    healthy = NodeReport(VERSIONS, [], [])
    return look_findings({OWN: healthy, OTHER: replace(healthy, **changes)}, OWN, {"--run-dir": "/runs/x"})


def test_healthy_nodes_have_facts_alone() -> None:
    found = _looks()
    assert [finding.status for finding in found] == ["fact", "fact"]
    assert found[0].fact == "Python and 2 packages are the same on all nodes"
    assert found[1].fact == "all 2 nodes see --run-dir"


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("torch", "2.11.0", "torch is 2.13.0 here and 2.11.0 on node 10.0.0.2"),
        ("torch", None, "torch is 2.13.0 here and not installed on node 10.0.0.2"),
        ("python", "3.12.1", "python is 3.11.7 here and 3.12.1 on node 10.0.0.2"),
    ],
)
def test_a_version_that_differs(package: str, version: str | None, said: str) -> None:
    versions = {name: there for name, there in (VERSIONS | {package: version}).items() if there is not None}
    found = one(_looks(versions=versions))
    assert found.fact == said and found.cure == "run `bash scripts/setup-env.sh` there, from the same checkout"


def test_two_checkouts_of_one_version_differ(tmp_path: Path) -> None:
    versions = []
    for number in (1, 1, 2):
        folder = tmp_path / str(len(versions)) / "fusionrl"
        (folder / "base").mkdir(parents=True)
        (folder / "base/one.py").write_text(f"x = {number}\n")
        (folder / "base/one.pyc").write_text(str(len(versions)))
        versions.append(installed_versions(folder))
    assert versions[0] == versions[1]
    assert [name for name in versions[0] if versions[0][name] != versions[2].get(name)] == ["fusionrl"]
    found = one(look_findings({OWN: NodeReport(versions[0], [], []), OTHER: NodeReport(versions[2], [], [])}, OWN, {}))
    assert found.check == "versions" and found.fact.count("(sources ") == 2


def test_what_another_node_lacks_is_told_with_its_name() -> None:
    found = one(_looks(missing=["--run-dir"]))
    assert found.fact == "node 10.0.0.2 does not see --run-dir /runs/x" and "mounts" in found.cure
    found = one(_looks(findings=[fault("shm", "/dev/shm has 0.1 GiB free", "give it more")]))
    assert (found.check, found.fact) == ("shm", "node 10.0.0.2: /dev/shm has 0.1 GiB free")
    error = RuntimeError("ModuleNotFoundError: No module named 'fusionrl'")
    found = one(look_findings({OWN: NodeReport({"python": "3"}, [], []), OTHER: error}, OWN, {}))
    assert "node 10.0.0.2: it cannot be examined (ModuleNotFoundError" in found.fact


def test_too_few_devices() -> None:
    plan: Any = SimpleNamespace(num_bundles=4)
    found = one(device_findings({OWN: 2, OTHER: 1}, plan))
    assert found.fact == "2 nodes, 3 devices: 10.0.0.1 has 2, 10.0.0.2 has 1; the plan needs 4"
    assert device_findings({OWN: 2, OTHER: 2}, plan)[0].status == "fact"


def test_a_way_that_is_closed() -> None:
    """One node listens; nobody listens at the other's port."""
    listening, with_none = NodeDoctor(), NodeDoctor()
    port = listening.listen("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()[1]
    places = {OWN: ("127.0.0.1", port), OTHER: ("127.0.0.1", dead)}
    failed = with_none.reach(places)
    assert set(failed) == {OTHER} and "refused" in failed[OTHER]
    found = one(reach_findings({OWN: failed, OTHER: {}}))
    assert found.fact.startswith("no connection from node 10.0.0.1 to node 10.0.0.2 (") and "TCP" in found.cure
    assert reach_findings({OWN: {}, OTHER: {}})[0].fact == "all 2 nodes reach each other by TCP"
    assert "node 10.0.0.1: it could not try" in one(reach_findings({OWN: OSError("no such address")})).fact


def test_a_sum_over_nodes() -> None:
    (found,) = reduce_findings({OWN: 0.1, OTHER: 0.1})
    assert found.status == "fact" and "16 MiB over 2 nodes" in found.fact
    broken = one(reduce_findings({OWN: 0.1, OTHER: RuntimeError("no interface eth7")}))
    assert "node 10.0.0.2: an all-reduce over the nodes fails (no interface eth7)" in broken.fact


def test_clocks_that_differ() -> None:
    found = one(clock_findings({OTHER: (-90.0, 0.01)}), "warning")
    assert "the clock of node 10.0.0.2 is 90.0 s behind" in found.fact and "NTP" in found.cure
    assert clock_findings({OTHER: (1.5, 0.9)})[0].status == "fact", "the answer took as long"
    # Two other nodes, of which neither is far from this machine's.
    found = one(clock_findings({OTHER: (0.7, 0.01), THIRD: (-0.6, 0.01)}), "warning")
    assert "the clock of node 10.0.0.2 is 1.3 s ahead of that of node 10.0.0.3" in found.fact
    near = clock_findings({OTHER: (0.004, 0.001), THIRD: (-0.003, 0.001)})
    assert near[0].fact == "wall clocks of the nodes differ by 7 ms at most"
    silent, behind = clock_findings({OTHER: TimeoutError("no answer within 120 s"), THIRD: (-90.0, 0.01)})
    assert silent.fact == "node 10.0.0.2 does not tell its time (no answer within 120 s)"
    assert silent.status == behind.status == "warning" and "90.0 s behind" in behind.fact


def test_a_node_that_cannot_import_torch() -> None:
    found = one(prepare_findings({OWN: "2.13.0", OTHER: RuntimeError("ImportError: libgomp.so.1")}))
    assert found.fact == "node 10.0.0.2: torch is not imported (ImportError: libgomp.so.1)"
    assert prepare_findings({OWN: "2.13.0"}) == []


def test_a_node_s_own_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "shared_memory_findings", lambda: [fault("shm", "too small", "more")])
    look = NodeDoctor().look(Order(None, "cpu", {"--run-dir": str(tmp_path), "--hf-checkpoint": str(tmp_path / "no")}))
    assert look.missing == ["--hf-checkpoint"] and look.findings[0].fact == "too small"
    assert look.versions == installed_versions() and {"python", "torch", "ray"} <= set(look.versions)


def test_a_node_s_gpus_are_looked_at_where_the_run_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "gpu_findings", lambda: [fact("gpu", "seen")])
    for device in ("cpu", "cuda"):
        assert (fact("gpu", "seen") in NodeDoctor().look(Order(None, device, {})).findings) == (device == "cuda")
