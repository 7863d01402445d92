"""The house: each room imports only from the rooms below it, lazy imports included; the wings are optional.

A room is a package or module of `fusionrl/`. To add one: put it on its floor in FLOORS. To move code that needs a room
above: pass in what it needs, or move it up.
"""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import setuptools

PACKAGE = Path(__file__).parents[1] / "fusionrl"

# From the ground up. Rooms on one floor do not import each other.
FLOORS = (
    ("base",),
    ("pipeline",),
    ("observe", "sandbox", "algorithms"),
    ("config", "data", "models"),
    ("plan",),
    ("engines",),
    ("rewards", "weights"),
    ("rollout",),
    ("buffer", "trainer"),
    ("checks",),
    ("runtime",),
    ("cli", "plugin_api"),
)
# The wings may import every room; of the rooms, only these files import a wing.
WINGS = {
    "cpu": {
        "base/cpu_wing.py",
        "engines/launch_server.py",
        *("trainer/layers.py", "trainer/local_attention.py", "trainer/local_layers.py", "trainer/packed_row.py"),
        *("trainer/log_probs.py", "trainer/process_groups.py", "trainer/settings.py"),
    },
    "compat": {"cli/from_slime.py", *("config/hook_files.py", "config/passed_flags.py")},
}
# Which rooms, or files, may import these packages at all; the others start without them.
HEAVY = {
    "ray": {"buffer", "runtime", "weights", "trainer"},
    "megatron": {"cpu", "models", "weights", "trainer", "checks", "compat", "config/upstream_flags.py"},
    "sglang": {
        *("cpu", "rollout", "config/upstream_flags.py", "engines/launch_server.py", "engines/server_patches.py"),
        "engines/adapter_versions.py",
    },
    "sglang_router": {"engines", "config/upstream_flags.py"},
    "transformer_engine": {"trainer"},
    "torch": {
        *("base", "observe", "algorithms", "cpu", "data", "models", "engines", "weights", "trainer", "checks"),
        *("runtime", "compat"),
    },
}
# A function of slime's that its users replace in the module that has it, and which that module's own class calls.
KNOWN_CYCLES = {("fusionrl.rollout.generate_state", "fusionrl.rollout.sglang_rollout")}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


@cache
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _imports(path: Path, root: Path, for_annotations: bool = True) -> list[tuple[int, str]]:
    """(line, full name) of every import of a file below `root`, within functions too."""
    found, nodes = [], list(ast.walk(_parse(path.read_text(encoding="utf-8"))))
    blocks = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {node for block in blocks for part in block.body for node in ast.walk(part) if not for_annotations}
    for node in nodes:
        if isinstance(node, ast.Import) and node not in typed:
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node not in typed:
            above = path.parents[node.level - 1].parts[len(root.parts) :] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def offences(package: Path) -> list[str]:
    """One line for each import that the table does not allow: where it stands, what it takes, and why not."""
    found = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        place, file = path.relative_to(package.parent), str(path.relative_to(package))
        if room not in FLOOR_OF and room not in WINGS:
            found.append(f"{place}: {room} stands on no floor")
            continue
        for line, name in _imports(path, package.parent):
            first, _, rest = name.partition(".")
            if first in HEAVY and not {room, file} & HEAVY[first]:
                found.append(f"{place}:{line}: {room} may not import {first}")
            target = rest.split(".")[0]
            if first != package.name or target == room or target == "__version__":
                continue
            if target in WINGS:
                if room in WINGS or file not in WINGS[target]:
                    found.append(f"{place}:{line}: {room} may not import the wing {target}")
            elif room in WINGS:
                continue
            elif target not in FLOOR_OF:
                found.append(f"{place}:{line}: {target} stands on no floor")
            elif FLOOR_OF[target] >= FLOOR_OF[room]:
                found.append(f"{place}:{line}: {room} imports {target}, which is not below it")
    return found


def test_rooms_import_only_from_below() -> None:
    found = offences(PACKAGE)
    assert not found, "\n".join(found)


def room_imports(package: Path) -> dict[str, set[str]]:
    """Module → modules of its room that it imports, within functions too; not for annotations alone (TYPE_CHECKING)."""
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    graph = {}
    for module, path in modules.items():
        names = {name for _, name in _imports(path, package.parent, for_annotations=False)}
        imported = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
        graph[module] = {name for name in imported if name.split(".")[:2] == module.split(".")[:2]}
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of a graph, from a module to itself; [] without one."""
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_of_a_room_run_in_a_circle() -> None:
    """Each module can be read after those that it imports."""
    graph = room_imports(PACKAGE)
    for module, imported in KNOWN_CYCLES:
        graph[module].remove(imported)  # fails where it is mended
    assert not cycle(graph)


def test_a_circle_is_found(tmp_path: Path) -> None:
    room = tmp_path / "fusionrl" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").touch()
    (room / "a.py").write_text("def f():\n    from fusionrl.room import b\n")
    line = "from fusionrl.room.a import f\n"
    (room / "b.py").write_text(f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}")
    assert cycle(room_imports(room.parent)) == []
    (room / "b.py").write_text(line)
    assert set(cycle(room_imports(room.parent))) == {"fusionrl.room.a", "fusionrl.room.b"}


def test_the_tables_name_what_is_there() -> None:
    there = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name[0] not in "_."}
    assert there == {*FLOOR_OF, *WINGS}
    for name in set().union(*HEAVY.values(), *WINGS.values()):
        assert name in there or (PACKAGE / name).is_file(), name


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("data/rows.py", "def f():\n    from fusionrl.rollout import agent", "data imports rollout"),
        ("models/shape.py", "import fusionrl.config.config", "models imports config"),
        ("plan/layout.py", "import torch.distributed", "plan may not import torch"),
        ("plan/layout.py", "from fusionrl.cpu import kernels", "plan may not import the wing cpu"),
        ("attic/new.py", "", "attic stands on no floor"),
    ],
)
def test_an_offence_is_found(tmp_path: Path, file: str, line: str, said: str) -> None:
    path = tmp_path / "fusionrl" / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    (found,) = offences(tmp_path / "fusionrl")
    assert said in found and file in found


def test_no_program_joins_a_cluster_of_others() -> None:
    """Without an address, Ray joins whatever cluster this machine happens to run: another test's, a colleague's."""
    files = [
        file for folder in ("fusionrl", "plugins", "tools", "tests") for file in (PACKAGE.parent / folder).rglob("*.py")
    ]
    begins = [(file, first) for file in files for first in re.findall(r"\bray\.init\(\s*(.{8})", file.read_text())]
    assert len(begins) > 2
    assert not [file for file, first in begins if first not in ("address=", '"local",')]


def test_a_wheel_has_every_file_that_is_not_python(monkeypatch: pytest.MonkeyPatch) -> None:
    named: dict[str, list[str]] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: named.update(given["package_data"]))
    monkeypatch.chdir(PACKAGE.parent)
    runpy.run_path("setup.py")
    patterns = [f"{package.replace('.', '/')}/{pattern}" for package, some in named.items() for pattern in some]
    packed = {file for pattern in patterns for file in Path().glob(pattern)}
    files = {file for file in Path("fusionrl").rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert files <= packed
