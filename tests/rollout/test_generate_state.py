"""Whom a `GenerateState` speaks of where a rollout and an evaluation are open at once."""

import asyncio
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

from fusionrl.config.config import Config
from fusionrl.rollout.generate_state import GenerateState, client_of, rollout_open


def test_an_evaluation_beside_a_rollout_that_stops_is_not_aborted() -> None:
    evaluation, rollout = Config().to_args(), Config().to_args()
    rollout.is_stopping = lambda: True
    begun, ended = threading.Event(), threading.Event()

    def roll_out() -> bool:
        with rollout_open(rollout):
            begun.set()
            ended.wait(20)
            return GenerateState(rollout).aborted

    with rollout_open(evaluation), ThreadPoolExecutor(1) as thread:
        other = thread.submit(roll_out)
        assert begun.wait(20)
        found = GenerateState(evaluation).aborted
        ended.set()
        assert (found, other.result(20)) == (False, True)


def test_an_evaluation_and_a_rollout_on_one_loop_keep_their_clients() -> None:
    """Modelled on functions that run both on a loop of their own (`fusionrl.rollout.event_loop.run`)."""

    def flags(port: int) -> Namespace:
        url = f"http://127.0.0.1:{port}"
        return Config().to_args(router_url=url, engine_urls=[url], api_key=None, vocab_size=512)

    async def ask() -> None:
        rollout, evaluation = flags(1), flags(2)
        first, other = client_of(rollout), client_of(evaluation)
        assert None not in (first, other) and first is not other
        assert (client_of(rollout), client_of(evaluation)) == (first, other)

    asyncio.run(ask())
