"""A reward model's engine that fails, refuses or hangs; what it computes is in tests/engines/test_scorers.py."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.data.sample import Sample
from fusionrl.rewards.dispatch import RewardError, async_rm, lost_metrics
from fusionrl.rewards.reward_model import MAX_IN_FLIGHT
from tests.tiny_model import make_classifier


@pytest.fixture(scope="module")
def rm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tiny_model, tmp_path_factory.mktemp("rm") / "model")


@pytest.fixture
def args(tiny_model: Path, rm: Path, json_server: Any) -> Any:
    flags = {"hf_checkpoint": str(tiny_model), "rm_model": str(rm), "rm_type": "reward_model"}
    return Config.from_flat(flags).to_args(api_key="a key", rm_urls=[json_server.url])


def score(args: Any, *samples: Sample) -> list[Any]:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(async_rm(args, sample) for sample in samples))

    return asyncio.run(ask())


def test_a_failure_is_tried_again(args: Any, json_server: Any) -> None:
    json_server.answers += [(503, {}), (200, {"embedding": [0.25]})]
    assert score(args, Sample(tokens=[1, 2, 3])) == [0.25]
    assert json_server.asked == [({"input_ids": [1, 2, 3]}, "Bearer a key")] * 2


def test_a_refusal_and_a_score_that_is_no_number_name_the_sample(args: Any, json_server: Any) -> None:
    json_server.answers += [(400, {"error": "too long"}), (200, {"embedding": [None]})]
    for urls, message in (
        (args.rm_urls, "--rm-type reward_model: .* answered 400: .*too long.* at sample 5"),
        (args.rm_urls, "reward_model: .*classify: embedding.0. is None, not a finite score at sample 5"),
        ([], "there is no reward model; give --rm-model at sample 5"),
    ):
        args.rm_urls = urls
        with pytest.raises(RewardError, match=message):
            score(args, Sample(index=5, tokens=[1]))


def test_an_engine_that_hangs_costs_the_samples_their_reward(args: Any) -> None:
    """Requests under way are bounded, and waiting for one's turn is not counted."""
    args.reward_timeout_s, args.reward_failure_value = 1.0, -7.0
    lost_metrics()

    async def scene() -> tuple[list[Any], int]:
        under_way = most = 0

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            while await reader.read(65536):
                pass
            under_way -= 1
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        args.rm_urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]
        async with server:
            samples = [Sample(tokens=[1, 2]) for _ in range(MAX_IN_FLIGHT + 9)]
            return await asyncio.gather(*(async_rm(args, sample) for sample in samples)), most

    start = time.monotonic()
    found, most = asyncio.run(scene())
    assert found == [-7.0] * (MAX_IN_FLIGHT + 9)
    assert lost_metrics() == {"rollout/reward_timeout": MAX_IN_FLIGHT + 9}
    assert most == MAX_IN_FLIGHT
    assert time.monotonic() - start > 2.0


def test_without_a_reward_a_distilled_sample_gets_none(args: Any) -> None:
    args.rm_type, args.use_opd, args.rm_urls = None, True, []
    assert score(args, Sample(tokens=[1, 2])) == [0.0]
