"""What each process of a run imports before it does anything: torch takes a second of a core, and 200 MB."""

from __future__ import annotations

import pytest

from tests.own_process import assert_runs

NURSERY = "fusionrl.runtime.engine_worker, fusionrl.runtime.worker_actors, fusionrl.runtime.ray_imports"


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("fusionrl.runtime.run", "torch transformers megatron sglang matplotlib"),
        ("fusionrl.runtime.worker_actors", "torch transformers megatron sglang matplotlib"),
        # A command begins before it imports what reads its flags: a third of a second, in which the nursery has torch.
        ("fusionrl.cli.train", "numpy pydantic fusionrl.config fusionrl.plan fusionrl.engines"),
        # An engine's actor needs nothing of Buffer and trainers.
        ("fusionrl.runtime.engine_worker", "fusionrl.buffer fusionrl.trainer fusionrl.config aiohttp"),
        # Ray reads the number of the job when it is loaded, and the nursery has none yet: no worker would start.
        (f"{NURSERY}, fusionrl.runtime.tokenizer_imports", "ray"),
    ],
)
def test_what_a_process_leaves_out(modules: str, absent: str) -> None:
    assert_runs(f"import sys, {modules}\nfound = set({absent.split()}) & set(sys.modules)\nassert not found, found\n")


def test_who_sends_engines_nothing_imports_no_client_of_theirs() -> None:
    """A tenth of a second for the command, and for the nursery of a run without engines."""
    code = (
        "import sys, fusionrl.cli.train, fusionrl.runtime.run\n"
        "import fusionrl.runtime.worker_actors, fusionrl.runtime.ray_imports, fusionrl.runtime.tokenizer_imports\n"
        "assert 'aiohttp' not in sys.modules\n"
        "from fusionrl.engines.client import GenerateClient\n"
        "GenerateClient('http://127.0.0.1:1')._headers_of(None)\n"
        "assert 'aiohttp' not in sys.modules"
    )
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
