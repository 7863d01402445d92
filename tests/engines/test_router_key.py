"""The router's key: refusals explain themselves, and a router without a key lets every client of this machine in."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from fusionrl.engines.post_request import post
from fusionrl.engines.router import Router
from tests.rollout.engine import KEY, sglang_engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang_router is not installed"),
]


@pytest.fixture
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Router]:
    """A router with the key that the test is parametrized by."""
    made = Router("127.0.0.1", str(tmp_path), api_key=request.param)
    made.start()
    yield made
    made.shutdown()


@pytest.mark.parametrize("router", [KEY], indirect=True)
def test_what_is_refused_is_explained(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    """A client without the key sees a bare 401; the log says how many, and what to send."""
    for headers in ({}, {"Authorization": "Bearer another"}):
        answer = requests.post(f"{router.url}/generate", json={"text": "x"}, headers=headers, timeout=30)
        assert (answer.status_code, answer.text) == (401, "")
    with caplog.at_level(logging.WARNING):
        router.warn_of_refusals()
        router.warn_of_refusals()
    (said,) = (record.getMessage() for record in caplog.records)
    assert "answered 401 to 2 requests" in said
    assert all(word in said for word in ("Authorization: Bearer", "args.api_key", "FUSIONRL_ROUTER_KEY"))
    with pytest.raises(RuntimeError, match=r"answered 401: .*Authorization: Bearer KEY.*--router-api-key none"):
        asyncio.run(post(f"{router.url}/generate", {"text": "x"}))
    assert KEY not in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("router", [None], indirect=True)
def test_a_router_without_a_key_lets_any_client_in(router: Router, tiny_model: Path, tmp_path: Path) -> None:
    """The engine behind it keeps its key, which the router sends."""
    engine = sglang_engine(tiny_model, tmp_path / "engine", 4096)
    payload = {"text": "Where?", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    try:
        router.add_worker(engine.start(), KEY)
        for headers in ({}, {"Authorization": "Bearer of my own"}, {"Authorization": f"Bearer {KEY}"}):
            answer = requests.post(f"{router.url}/generate", json=payload, headers=headers, timeout=60)
            assert answer.status_code == 200, (headers, answer.text)
            assert answer.json()["meta_info"]["completion_tokens"] == 3
        assert requests.post(f"{engine.url}/generate", json=payload, timeout=60).status_code == 401
    finally:
        engine.shutdown()
    # On a CPU it is not asked to end by itself, which takes SGLang 5 s.
    assert engine._server is not None and engine._server.exit_status() == "killed by SIGKILL"
    assert router.num_refused() == 0
