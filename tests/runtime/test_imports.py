"""What each process of a run imports before it does anything: torch takes a second of a core, and 200 MB."""

from __future__ import annotations

import pytest

from tests.own_process import assert_runs

NURSERY = "fusionrl.runtime.engine_worker, fusionrl.runtime.worker_actors, fusionrl.runtime.ray_imports"
LATE = "torch transformers megatron sglang matplotlib"


@pytest.mark.parametrize(
    "stages",
    [
        {
            # A command begins before it imports what reads its flags: a third of a second, in which the nursery has
            # torch.
            "fusionrl.cli.train": "numpy pydantic fusionrl.config fusionrl.plan fusionrl.engines",
            "fusionrl.runtime.run": f"{LATE} aiohttp",
            "fusionrl.runtime.worker_actors": LATE,
        },
        {
            # An engine's actor needs nothing of Buffer and trainers.
            "fusionrl.runtime.engine_worker": "fusionrl.buffer fusionrl.trainer fusionrl.config aiohttp",
            # Ray reads the number of the job when it is loaded, and the nursery has none yet: no worker would start.
            # Who sends engines nothing needs no client of theirs.
            f"{NURSERY}, fusionrl.runtime.tokenizer_imports": "ray aiohttp",
        },
    ],
    ids=["a driver", "an engine"],
)
def test_what_a_process_leaves_out(stages: dict[str, str]) -> None:
    """One process takes the stages in turn."""
    code = "import sys\n"
    for modules, absent in stages.items():
        code += f"import {modules}\nfound = set({absent.split()}) & set(sys.modules)\nassert not found, found\n"
    assert_runs(code)


def test_ray_needs_what_is_imported_before_it() -> None:
    """A package that Ray no longer imports is imported for nothing."""
    code = (
        "import sys, ray, ray.actor, ray._private.node, ray._private.async_compat\n"
        "import ray._private.runtime_env.setup_hook\n"
        "found = set(sys.modules)\n"
        "from fusionrl.runtime.ray_imports import NEEDS\n"
        "assert not set(NEEDS) - found, set(NEEDS) - found\n"
    )
    assert_runs(code)


def test_ray_has_the_processes_that_are_left_out() -> None:
    """A version of Ray that calls them otherwise would start all of them, in silence."""
    from ray._private.node import Node

    from fusionrl.runtime.ray_processes import _UNUSED, only_what_is_used

    usual = {name: getattr(Node, name) for name in _UNUSED}
    with only_what_is_used(dashboard=False):
        assert all(getattr(Node, name) is not usual[name] for name in _UNUSED)
    with only_what_is_used(dashboard=True):
        assert all(getattr(Node, name) is usual[name] for name in _UNUSED)
    assert all(getattr(Node, name) is usual[name] for name in _UNUSED)


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ("4,2", 4), ("", None), ("many", None), ("0", None), (" 08", 8)]
)
def test_threads_of_a_fork(text: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenMP takes for no number changes nothing, and ends no worker."""
    import torch

    from fusionrl.runtime.worker_fork import _limit_threads

    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    _limit_threads(text)
    assert found == ([] if expected is None else [expected])


def test_a_fork_has_the_threads_that_ray_gives_to_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets the variable before the task is called, which would import torch: here it is imported before."""
    import ray._private.utils
    import torch

    from fusionrl.runtime.worker_fork import _RAY_S_LIMIT, _follow_ray_s_limit

    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    answers = [True, False]  # whether Ray sets it: not where the user has
    monkeypatch.setattr(ray._private.utils, _RAY_S_LIMIT, lambda: answers.pop(0))
    _follow_ray_s_limit()
    assert [getattr(ray._private.utils, _RAY_S_LIMIT)() for _ in range(2)] == [True, False] and found == [3]
