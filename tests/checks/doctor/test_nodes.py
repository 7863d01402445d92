"""`fusionrl doctor` on a cluster: planted faults, and the order of questions; e2e/test_two_nodes.py has real nodes."""

import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.checks.doctor import machine, nodes
from fusionrl.checks.doctor.examine import Examined
from fusionrl.checks.doctor.findings import Finding, fact, fault
from fusionrl.checks.doctor.nodes import installed_versions
from fusionrl.cli.doctor import cluster_findings
from fusionrl.config.parser import read_args
from fusionrl.runtime.ray_cluster import Node
from tests.checks.doctor.test_machine import one

VERSIONS: dict[str, str | None] = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"}
OWN, OTHER, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def _looks(**changes: Any) -> list[Finding]:
    """Findings of two healthy nodes, but for `changes` of the other one's look."""
    healthy = nodes.NodeReport(VERSIONS, [], [])
    return nodes.look_findings({OWN: healthy, OTHER: replace(healthy, **changes)}, OWN, {"--run-dir": "/runs/x"})


def test_versions_that_differ() -> None:
    same, seen = _looks()
    assert same == fact("versions", "Python and 2 packages are the same on all nodes")
    assert seen == fact("shared", "all 2 nodes see --run-dir")
    for package, version, said in (
        ("torch", "2.11.0", "torch is 2.13.0 here and 2.11.0 on node 10.0.0.2"),
        ("torch", None, "torch is 2.13.0 here and not installed on node 10.0.0.2"),
        ("python", "3.12.1", "python is 3.11.7 here and 3.12.1 on node 10.0.0.2"),
    ):
        found = one(_looks(versions={name: v for name, v in (VERSIONS | {package: version}).items() if v is not None}))
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
    first, last = (nodes.NodeReport(versions[place], [], []) for place in (0, 2))
    found = one(nodes.look_findings({OWN: first, OTHER: last}, OWN, {}))
    assert found.check == "versions" and found.fact.count("(sources ") == 2


def test_what_another_node_lacks_is_told_with_its_name() -> None:
    found = one(_looks(missing=["--run-dir"]))
    assert found.fact == "node 10.0.0.2 does not see --run-dir /runs/x" and "mounts" in found.cure
    found = one(_looks(findings=[fault("shm", "/dev/shm has 0.1 GiB free", "give it more")]))
    assert (found.check, found.fact) == ("shm", "node 10.0.0.2: /dev/shm has 0.1 GiB free")
    error = RuntimeError("ModuleNotFoundError: No module named 'fusionrl'")
    found = one(nodes.look_findings({OWN: nodes.NodeReport({"python": "3"}, [], []), OTHER: error}, OWN, {}))
    assert "node 10.0.0.2: it cannot be examined (ModuleNotFoundError" in found.fact


def test_too_few_devices() -> None:
    plan: Any = SimpleNamespace(num_bundles=4)
    found = one(nodes.device_findings({OWN: 2, OTHER: 1}, plan))
    assert found.fact == "2 nodes, 3 devices: 10.0.0.1 has 2, 10.0.0.2 has 1; the plan needs 4"
    assert nodes.device_findings({OWN: 2, OTHER: 2}, plan)[0].status == "fact"


def test_a_way_that_is_closed() -> None:
    """One node listens; nobody listens at the other's port."""
    listening, with_none = nodes.NodeDoctor(), nodes.NodeDoctor()
    port = listening.listen("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()[1]
    places = {OWN: ("127.0.0.1", port), OTHER: ("127.0.0.1", dead)}
    failed = with_none.reach(places)
    assert set(failed) == {OTHER} and "refused" in failed[OTHER]
    found = one(nodes.reach_findings({OWN: failed, OTHER: {}}))
    assert found.fact.startswith("no connection from node 10.0.0.1 to node 10.0.0.2 (") and "TCP" in found.cure
    assert nodes.reach_findings({OWN: {}, OTHER: {}})[0].fact == "all 2 nodes reach each other by TCP"
    assert "node 10.0.0.1: it could not try" in one(nodes.reach_findings({OWN: OSError("no such address")})).fact


def test_a_sum_over_nodes() -> None:
    (found,) = nodes.reduce_findings({OWN: 0.1, OTHER: 0.1})
    assert found.status == "fact" and "16 MiB over 2 nodes" in found.fact
    broken = one(nodes.reduce_findings({OWN: 0.1, OTHER: RuntimeError("no interface eth7")}))
    assert "node 10.0.0.2: an all-reduce over the nodes fails (no interface eth7)" in broken.fact


def test_clocks_that_differ() -> None:
    found = one(nodes.clock_findings({OTHER: (-90.0, 0.01)}), "warning")
    assert "the clock of node 10.0.0.2 is 90.0 s behind" in found.fact and "NTP" in found.cure
    assert nodes.clock_findings({OTHER: (1.5, 0.9)})[0].status == "fact", "the answer took as long"
    # Two other nodes, of which neither is far from this machine's.
    found = one(nodes.clock_findings({OTHER: (0.7, 0.01), THIRD: (-0.6, 0.01)}), "warning")
    assert "the clock of node 10.0.0.2 is 1.3 s ahead of that of node 10.0.0.3" in found.fact
    near = nodes.clock_findings({OTHER: (0.004, 0.001), THIRD: (-0.003, 0.001)})
    assert near[0].fact == "wall clocks of the nodes differ by 7 ms at most"
    silent, behind = nodes.clock_findings({OTHER: TimeoutError("no answer within 120 s"), THIRD: (-90.0, 0.01)})
    assert silent.fact == "node 10.0.0.2 does not tell its time (no answer within 120 s)"
    assert silent.status == behind.status == "warning" and "90.0 s behind" in behind.fact


def test_a_node_s_own_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs are looked at where the run uses them."""
    monkeypatch.setattr(machine, "shared_memory_findings", lambda: [fault("shm", "too small", "more")])
    monkeypatch.setattr(machine, "gpu_findings", lambda: [fact("gpu", "seen")])
    folders = {"--run-dir": str(tmp_path), "--hf-checkpoint": str(tmp_path / "no")}
    look, of_gpus = (nodes.NodeDoctor().look(nodes.Order(None, device, folders)) for device in ("cpu", "cuda"))
    assert look.missing == ["--hf-checkpoint"] and look.findings[0].fact == "too small"
    assert look.versions == installed_versions() and {"python", "torch", "ray"} <= set(look.versions)
    assert [fact("gpu", "seen") in made.findings for made in (look, of_gpus)] == [False, True]


class _Nodes:
    """Two nodes in this process, of which the first is this machine. A cluster of Ray takes 10 s to start."""

    def __init__(self, asked: list[str], **answers: object) -> None:
        self.nodes = [Node(OWN, "127.0.0.1", True, 1), Node(OTHER, "127.0.0.1", False, 1)]
        self._doctors = {name: nodes.NodeDoctor() for name in (OWN, OTHER)}
        self._asked, self._answers = asked, answers

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


def _findings(
    monkeypatch: pytest.MonkeyPatch, flags: Sequence[str] = (), plan: Any = None, **answers: object
) -> tuple[dict[str, Finding], list[str]]:
    """Findings by check, and the questions to the nodes."""
    asked: list[str] = []
    cluster = nullcontext(_Nodes(asked, **answers))
    monkeypatch.setattr("fusionrl.runtime.ray_cluster.NodeActors", lambda *_, **__: cluster)
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
        plan = None if flags else SimpleNamespace(num_bundles=2, memory=None)
        assert _findings(monkeypatch, flags, plan)[0]["shared"].fact == "all 2 nodes see --run-dir"
    assert not list(tmp_path.iterdir()), "the file is gone"
    # Each node has a /proc of its own, in which nobody can make files.
    found, _ = _findings(monkeypatch, ["--run-dir", "/proc"])
    assert found["shared"].status == "warning" and found["shared"].fact.startswith("--run-dir /proc: no file can be")


def test_a_node_that_cannot_import_torch() -> None:
    (found,) = nodes.prepare_findings({OWN: "2.13.0", OTHER: RuntimeError("ImportError: libgomp.so.1")})
    assert found.fact == "node 10.0.0.2: torch is not imported (ImportError: libgomp.so.1)"


def test_a_clock_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = _findings(monkeypatch, now=TimeoutError("no answer within 120 s"))
    assert found["clock"].status == "warning" and "10.0.0.2 does not tell its time" in found["clock"].fact
    assert asked.count("now of 1") == 1
