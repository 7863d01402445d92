"""Complete reasoning-gym: labels for tasks that have none, and verifiers that a model cannot misuse.

Some verifiers evaluate what a model wrote, with Python's `eval` or with sympy, which evaluates Python too. Their
answers are looked at first, and only plain literals or plain arithmetic are handed on. Four verifiers take wrong
answers for right ones: puzzle24 does not compare the numbers of an answer with those of its puzzle,
game_of_life_halting takes any text, coin_flip a first digit, and complex_arithmetic `nan`.
"""

import ast
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

# Answers that are compared as text, and evaluated as a list where that fails.
LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# Answers that sympy reads: numbers and + - * / ( ), or functions and powers as well.
ARITHMETIC = frozenset({"countdown", "puzzle24"})
ALGEBRA = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
# No data of its own: it mixes other tasks.
MIXTURES = frozenset({"composite"})
FUNCTIONS = frozenset({"exp", "log", "ln", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"})
MAX_CHARACTERS, MAX_NODES, MAX_POWER, MAX_NUMBER = 20_000, 500, 100, 10**15
# Keys of the metadata that were tuples of tuples before they were written as JSON.
_TUPLES = {"arc_agi": ("output",), "rearc": ("output",)}
_STEPS = {"boxnet": re.compile(r"\d{6}"), "rush_hour": re.compile(r"\d{3}")}  # of longer numbers none is a step


def tasks() -> list[str]:
    """Names of all tasks that generate data."""
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - MIXTURES)


@cache
def dataset(task: str, config: str) -> Any:
    """The data set of a task, which has its verifier; `config` is its settings as JSON.

    Raises:
        ValueError: no such task, or settings that it does not take.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            "the reward needs the package reasoning-gym; scripts/setup-env.sh examples installs it"
        ) from error
    if task not in DATASETS or task in MIXTURES:
        raise ValueError(f"metadata.source_dataset is {task!r}, which reasoning-gym does not know")
    try:
        return reasoning_gym.create_dataset(task, **json.loads(config))
    except (AssertionError, TypeError) as error:  # how its configurations refuse a value and a name
        raise ValueError(f"{task} does not take the settings {config}: {error}") from error


def score(task: str, config: Mapping[str, Any], answer: str, entry: Mapping[str, Any]) -> float:
    """The verifier's score of an answer, in [0, 1]; `entry` is the item without its question, as read from JSON.

    An answer at which the verifier raises, or which it must not evaluate, scores 0.

    Raises:
        ValueError: the entry is not one of the task: the verifier raises at the entry's own answer, too.
    """
    if len(answer) > MAX_CHARACTERS or not is_safe(task, answer, entry):
        return 0.0
    verifier = dataset(task, json.dumps(config, sort_keys=True)).score_answer
    entry = _restored(task, entry)
    try:
        return float(verifier(answer=answer, entry=entry))
    except Exception as error:  # what a model writes can make a verifier raise anything
        try:
            verifier(answer=entry.get("answer"), entry=entry)
        except Exception:
            keys = ", ".join(entry)
            raise ValueError(f"metadata.entry is not an entry of {task}: it has {keys} ({error!r})") from error
        return 0.0


def _restored(task: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    metadata = dict(entry.get("metadata") or {})
    for key in _TUPLES.get(task, ()):
        metadata[key] = tuple(tuple(row) for row in metadata.get(key, ()))
    return {**entry, "metadata": metadata}


# ------------------------------------------------------------------------------------------------ what is handed on
def is_safe(task: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether the verifier may see an answer, and it is not one of those that it rewards wrongly."""
    if task in _STEPS and _STEPS[task].search(answer):
        return False
    if task == "complex_arithmetic":  # its verifier gives the full score at a distance of NaN
        return re.search(r"nan|inf", answer, re.IGNORECASE) is None
    if task == "game_of_life_halting":  # its verifier takes any text
        return answer.strip().lower() == str(entry.get("answer")).lower()
    if task == "coin_flip":  # its verifier takes the first digit, 0, for the whole
        return _is_probability(answer, str(entry.get("answer")))
    if task in LITERALS:
        return _is_literal(answer)
    if task in ALGEBRA:
        return _is_formula(answer, algebra=True)
    if task in ARITHMETIC and not _is_formula(answer, algebra=False):
        return False
    if task == "puzzle24":  # its verifier takes any four numbers that make 24
        numbers = sorted(int(number) for number in re.findall(r"\d+", answer))
        return numbers == sorted((entry.get("metadata") or {}).get("numbers", []))
    return True


def _is_probability(answer: str, expected: str) -> bool:
    """Return whether both are the same to a ten-thousandth, as the verifier means it."""
    try:
        return abs(Fraction(answer.replace(",", "")) - Fraction(expected)) <= Fraction(1, 10_000)
    except (ValueError, ZeroDivisionError):
        return False


def _parsed(answer: str) -> ast.expr | None:
    """The expression that Python reads in a text; None where it reads none."""
    try:
        return ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _is_literal(answer: str) -> bool:
    """Return whether `eval` does nothing with it: not an expression, a lone name, or lists and constants."""
    try:
        tree = _parsed(answer)
    except (RecursionError, MemoryError):
        return False
    kinds = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
    return tree is None or all(isinstance(node, kinds) for node in ast.walk(tree))


def _is_formula(answer: str, *, algebra: bool) -> bool:
    try:
        tree = _parsed(answer)
    except (RecursionError, MemoryError):
        return False
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    return len(nodes) <= MAX_NODES and _is_term(tree, algebra, powers=2)


def _is_term(node: ast.expr, algebra: bool, powers: int) -> bool:
    """Return whether it has only numbers and + - * /; with `algebra` also letters, functions and `powers` powers."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and abs(node.value) <= MAX_NUMBER
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _is_term(node.operand, algebra, powers)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        return _is_term(node.left, algebra, powers) and _is_term(node.right, algebra, powers)
    if not algebra:
        return False
    if isinstance(node, ast.Name):
        return (len(node.id) == 1 and node.id.isalpha()) or node.id == "pi"
    if isinstance(node, ast.Call):
        is_function = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        return is_function and len(node.args) == 1 and not node.keywords and _is_term(node.args[0], True, powers)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and powers:
        return _is_term(node.left, True, powers - 1) and _is_exponent(node, powers - 1)
    return False


def _is_exponent(node: ast.BinOp, powers: int) -> bool:
    number = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
    if isinstance(number, ast.BinOp) and isinstance(number.op, ast.Div):  # (x + 1)**(3/2)
        parts: list[ast.expr] = [number.left, number.right]
    else:
        parts = [number]
    values = [part.value for part in parts if isinstance(part, ast.Constant)]
    if len(values) == len(parts):
        return all(isinstance(value, int | float) and value <= MAX_POWER for value in values)
    # E**(2*x) is how these tasks write the exponential function.
    return isinstance(node.left, ast.Name) and _is_term(node.right, True, powers)


# ------------------------------------------------------------------------------------------------ labels
def gold_answer(task: str, item: Mapping[str, Any]) -> str | None:
    """An answer that the verifier gives the full score; None where none is known.

    Five tasks have several right answers and name none, or name an example in their metadata.
    """
    metadata = item["metadata"]
    if item["answer"] is not None:
        return str(item["answer"])
    if task == "graph_color":
        return json.dumps(metadata["possible_answer"])
    if task == "boxnet":
        return json.dumps(_move_boxes(metadata["initial_state"]))
    if task == "rush_hour":
        return _drive_out(item["question"].rstrip("\n").splitlines()[-6:])
    return next((str(metadata[key]) for key in ("example_correct_answer", "example_answer") if key in metadata), None)


def _move_boxes(state: Mapping[str, list[str]]) -> list[dict[str, str]]:
    """One move a step: each box goes square by square to a target of its colour."""
    places = {(tuple(float(number) for number in square.split("_"))): list(items) for square, items in state.items()}
    steps = []
    for start in list(places):
        for box in [item for item in places[start] if item.startswith("box_")]:
            target = "target_" + box.removeprefix("box_")
            square = list(start)
            goal = next(place for place, items in places.items() if target in items)
            places[goal].remove(target)
            for axis in (0, 1):
                while square[axis] != goal[axis]:
                    agent = f"Agent[{square[0]}, {square[1]}]"
                    square[axis] += 1 if goal[axis] > square[axis] else -1
                    steps.append({agent: f"move({box}, square[{square[0]}, {square[1]}])"})
            steps.append({f"Agent[{square[0]}, {square[1]}]": f"move({box}, {target})"})
    return steps


Cars = tuple[int, ...]  # of each car the cell of its first square, row by row


def _drive_out(board: list[str]) -> str | None:
    """Fewest steps that bring car A to the right end of its row, found breadth first."""
    size = len(board)
    cells: dict[str, list[int]] = {}
    for cell, letter in enumerate("".join(board)):
        cells.setdefault(letter, []).append(cell)
    walls = frozenset(cells.pop("x", []))
    cells.pop(".", None)
    names = sorted(cells)
    lengths = [len(cells[name]) for name in names]
    strides = [cells[name][1] - cells[name][0] for name in names]

    def steps(cars: Cars) -> Iterator[tuple[int, int, Cars]]:
        taken = walls.union(
            first + k * stride
            for first, length, stride in zip(cars, lengths, strides, strict=True)
            for k in range(length)
        )
        for car, (first, length, stride) in enumerate(zip(cars, lengths, strides, strict=True)):
            last = first + (length - 1) * stride
            at_start = first % size == 0 if stride == 1 else first < size
            at_end = last % size == size - 1 if stride == 1 else last >= size * (size - 1)
            if not at_end and last + stride not in taken:
                yield car, 1, (*cars[:car], first + stride, *cars[car + 1 :])
            if not at_start and first - stride not in taken:
                yield car, -1, (*cars[:car], first - stride, *cars[car + 1 :])

    start = tuple(cells[name][0] for name in names)
    goal = start[0] - start[0] % size + size - lengths[0]
    before: dict[Cars, tuple[Cars, int, int] | None] = {start: None}
    queue = deque([start])
    while queue:
        cars = queue.popleft()
        if cars[0] == goal:
            return _written(cars, before, names)
        for car, way, after in steps(cars):
            if after not in before:
                before[after] = (cars, car, way)
                queue.append(after)
    return None


def _written(cars: Cars, before: Mapping[Cars, tuple[Cars, int, int] | None], names: list[str]) -> str:
    """The way back from the goal, as `B+1 A+3`: steps of one car in a row are one move."""
    moves: list[tuple[int, int]] = []
    while (step := before[cars]) is not None:
        cars, car, way = step
        if moves and moves[-1][0] == car and moves[-1][1] * way > 0:
            moves[-1] = (car, moves[-1][1] + way)
        else:
            moves.append((car, way))
    return " ".join(f"{names[car]}{way:+d}" for car, way in reversed(moves))
