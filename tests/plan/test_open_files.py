"""The plan tells where the machine's open files are too few for the samples in flight."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.plan import open_files
from fusionrl.plan.open_files import open_file_warnings, samples_in_flight
from fusionrl.plan.plan import Plan, make_plan
from tests.plan.test_plan import SHAPE


def made(pipeline: str = "async", **values: Any) -> tuple[Config, Plan]:
    given = {"pipeline": pipeline, "rollout_batch_size": 128, "n_samples_per_prompt": 16, "num_rollout": 3}
    config = Config.from_flat(given | {"rollout_num_gpus": 2} | values)
    return config, make_plan(config, SHAPE, device="cpu", num_prompts=1000, num_cores=8)


@pytest.mark.parametrize(
    ("pipeline", "values", "samples"),
    [
        ("on-policy", {"sglang_server_concurrency": 4096}, 2048),
        ("on-policy", {}, 1024),  # as many as two engines take
        ("on-policy", {"sglang_server_concurrency": 4096, "over_sampling_batch_size": 192}, 3072),
        ("async", {"admission_lead": 1.0, "sglang_server_concurrency": 4096}, 4096),  # a version's own, and the lead
        ("async", {"admission_lead": 1.0, "max_samples_in_flight": 100}, 100),
        ("stream", {"update_weights_interval": 3, "sglang_server_concurrency": 4096}, 6144),
    ],
)
def test_samples_in_flight(pipeline: str, values: dict[str, Any], samples: int) -> None:
    assert samples_in_flight(*made(pipeline, **values)) == samples


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"admission_lead": 1.0, "sglang_server_concurrency": 4096}
    monkeypatch.setattr(open_files, "most_open_files", lambda: 8392)
    assert open_file_warnings(*made(**many)) == []  # just enough
    monkeypatch.setattr(open_files, "most_open_files", lambda: 8391)
    (text,) = open_file_warnings(*made(**many))
    assert "4096 samples may be in flight" in text and "8391, enough for 4095" in text
    assert "(ulimit -Hn) to 8392" in text and "--sglang-server-concurrency 2047" in text
    lowered = many | {"sglang_server_concurrency": 2047}
    assert open_file_warnings(*made(**lowered)) == []
    assert open_file_warnings(*made("on-policy", mode="sft", prompt_data="x.jsonl")) == []
