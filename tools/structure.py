"""Figures of the code's shape: sizes of files, functions and classes, broad excepts, `Any` in signatures.

    python tools/structure.py [--limits] [FOLDER]

With --limits the exit code is 1 if a figure is over its limit; EXCEPTIONS names classes that may be larger.
"""

import argparse
import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]
LIMITS = {
    "median file, lines": 250,
    "largest file, lines": 500,
    "longest function, lines": 80,
    "largest class, lines": 300,
    "most methods of a class": 20,
    "broad excepts in 1,000 lines": 0.5,
    "functions with Any in signature": 150,
}
EXCEPTIONS = {  # class → why it may be larger
    "fusionrl/data/sample.py Sample": "all fields of slime's Sample, and what hooks may call on it"
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Shape:
    """Sizes, each as (number, place), largest first."""

    files: list[tuple[int, str]]
    functions: list[tuple[int, str]]
    classes: list[tuple[int, str]]
    methods: list[tuple[int, str]]
    broad_excepts: list[str]
    signatures_with_any: list[str]

    @property
    def num_lines(self) -> int:
        """Lines of all files."""
        return sum(number for number, _ in self.files)

    def figures(self) -> dict[str, tuple[float, str]]:
        """Name of a limit → (figure, where it is)."""
        return {
            "median file, lines": (statistics.median(number for number, _ in self.files), ""),
            "largest file, lines": self.files[0],
            "longest function, lines": self.functions[0],
            "largest class, lines": self.classes[0],
            "most methods of a class": self.methods[0],
            "broad excepts in 1,000 lines": (1000 * len(self.broad_excepts) / self.num_lines, ""),
            "functions with Any in signature": (len(self.signatures_with_any), ""),
        }


def measure(folder: Path) -> Shape:
    """The shape of every Python file below `folder`."""
    shape = Shape([], [], [], [], [], [])
    for path in sorted(folder.rglob("*.py")):
        source, place = path.read_text(encoding="utf-8"), str(path.relative_to(folder.parent))
        shape.files.append((len(source.splitlines()), place))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function):
                shape.functions.append((_num_lines(node), f"{place}:{node.lineno} {node.name}"))
                if _has_any(node):
                    shape.signatures_with_any.append(f"{place}:{node.lineno} {node.name}")
            elif isinstance(node, ast.ClassDef) and f"{place} {node.name}" not in EXCEPTIONS:
                name = f"{place}:{node.lineno} {node.name}"
                shape.classes.append((_num_lines(node), name))
                shape.methods.append((sum(isinstance(statement, Function) for statement in node.body), name))
            elif isinstance(node, ast.ExceptHandler) and _is_broad(node):
                shape.broad_excepts.append(f"{place}:{node.lineno}")
    for sizes in (shape.files, shape.functions, shape.classes, shape.methods):
        sizes.sort(reverse=True)
    return shape


def _num_lines(node: Function | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """A handler of everything that does not raise again; such a one ends a resource and lets the error pass."""
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()
    is_wide = handler.type is None or bool(names & {"Exception", "BaseException"})
    return is_wide and not any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))


def _annotations(node: Function) -> Iterator[ast.expr]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    yield from (argument.annotation for argument in every if argument is not None and argument.annotation is not None)
    if node.returns is not None:
        yield node.returns


def _has_any(node: Function) -> bool:
    """Return whether one of its annotations has `Any`."""
    parts = (part for annotation in _annotations(node) for part in ast.walk(annotation))
    return any(isinstance(part, ast.Name) and part.id == "Any" for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=REPO / "fusionrl")
    parser.add_argument("--limits", action="store_true", help="Exit with 1 if a figure is over its limit.")
    parser.add_argument("--list", type=int, default=0, metavar="N", help="Show the N largest of each kind.")
    args = parser.parse_args()
    shape = measure(args.folder.resolve())
    print(f"{len(shape.files)} files, {shape.num_lines} lines")
    num_over = 0
    for name, (figure, place) in shape.figures().items():
        is_over = figure > LIMITS[name]
        num_over += is_over
        limit = f"limit {LIMITS[name]}" + (", over" if is_over else "")
        print(f"{name:<31} {figure:8.4g}   ({limit})  {place}")
    for title in ("files", "functions", "classes", "methods"):
        for number, place in getattr(shape, title)[: args.list]:
            print(f"  {title:<10} {number:5}  {place}")
    for place in shape.broad_excepts if args.list else ():
        print(f"  broad except {place}")
    return int(bool(args.limits and num_over))


if __name__ == "__main__":
    sys.exit(main())
