"""Weight pushes by files, from two trainer ranks to an engine: what it serves then, and after what goes wrong."""

import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.engines.http import call
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.weights.checksums import engine_checksums
from fusionrl.weights.disk import DiskOptions
from fusionrl.weights.push import Push, drop_files
from tests.tiny_model import make_tiny_qwen3
from tests.trainer.test_weight_files import drop, make_writer, spoil, write
from tests.trainer.trainer_worker import LocalRanks, Samples, config_of, weights
from tools.threaded import Threaded

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

PROMPT = [5, 9, 33, 77, 100, 20]


class Ranks:
    """All ranks as one trainer; `on_way` is called with each version's folder, before any host reads it."""

    def __init__(self, workers: LocalRanks) -> None:
        self.workers = workers
        self.on_way: Callable[[Path], Any] = lambda folder: None

    def write_weights(self, version: int, engines: list[Any], is_full: bool = False) -> dict[str, Any]:
        written = self.workers.run(write, version, is_full)[0]
        self.on_way(Path(written["folder"]))
        return written

    def drop_weights(self, keep: int | None) -> None:
        self.workers.run(drop, keep)


class Stack:
    """The engine computes in fp32 with the weights of the files, which are bf16: so a reference is exact."""

    def __init__(self, workers: LocalRanks, folder: Path) -> None:
        self.workers, self.folder = workers, folder
        self.model_path = make_tiny_qwen3(folder / "model", 0)
        self.layout = TrainerLayout(2, tp=2)
        self.ranks = Ranks(workers)
        self.version, self.served, self.local = 0, 0, folder / "local"
        where: dict[str, Any] = {"device": "cpu", "gpu_ids": (), "host": "127.0.0.1", "log_dir": str(folder)}
        model: dict[str, Any] = {"model_path": str(self.model_path), "dtype": "float32", "tp_size": 1, "seed": 1}
        limits: dict[str, Any] = {"start_timeout_s": 300.0, "server_args": {"max_total_tokens": 8192}}
        self.engine = EngineActor(EngineSpec(index=0, api_key="key", **where, **model, **limits))
        self.target = EngineTarget(0, Threaded(self.engine), "here", (0,))
        self.expected: dict[str, torch.Tensor] = {}

    def start_trainers(self, is_delta: bool) -> None:
        """New ones, whose first version is full. Engine and local copies stay."""
        self.workers.start(config_of(self.model_path, lr=1e-5, clip_grad=1.0), self.layout)
        options = DiskOptions(str(self.folder / "versions"), str(self.model_path), is_delta, "xor", "xxh3-128", 200_000)
        self.workers.run(make_writer, options)

    def train(self) -> None:
        self.workers.train(Samples().shards(), self.layout)

    def push(
        self,
        local: Path | None = None,
        is_copied: bool = True,
        on_way: Any = lambda folder: None,
        timeout_s: float = 120.0,
        **options: Any,
    ) -> dict[str, float]:
        self.version, self.ranks.on_way = self.version + 1, on_way
        options = {"keep_files": False, "pause_mode": "abort"} | options
        options["local_folder"] = str(local or self.local) if is_copied else None
        metrics = Push([Threaded(self.ranks)], [self.target], self.version, timeout_s).by_disk(**options)
        self.served = self.version
        found = self.workers.run(weights)[0]
        self.expected = {name: torch.from_numpy(x).bfloat16().float() for name, x in found.items()}
        return metrics

    def generate(self, num_tokens: int = 12) -> dict[str, Any]:
        params = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        payload = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
        return call("POST", self.engine.url + "/generate", payload, api_key="key", timeout_s=120.0)

    def log_probs(self, tokens: list[int]) -> np.ndarray:
        """By transformers, of the weights that were pushed last."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32).eval()
        model.load_state_dict(self.expected, strict=False)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()

    def assert_serves(self) -> None:
        """The last version that was pushed to its end, and no other: version, log-probs, and every tensor's bits."""
        answer = self.generate()["meta_info"]
        pairs = answer["output_token_logprobs"]
        expected = self.log_probs([token for _, token, _ in pairs])
        np.testing.assert_allclose([log_prob for log_prob, _, _ in pairs], expected, atol=1e-4)
        assert answer["weight_version"] == self.engine.weight_version() == str(self.served)
        found = call("POST", self.engine.url + "/weights_checker", {"action": "checksum"}, api_key="key")
        checksums = engine_checksums(self.expected.items(), read_model_shape(str(self.model_path)), 1)
        assert checksums is not None
        assert found["ranks"][0]["checksums"] == checksums[0]

    def versions(self) -> list[str]:
        return sorted(os.listdir(self.folder / "versions"))


@pytest.fixture(scope="module")
def running(forked_engines: None, workers: LocalRanks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(workers, tmp_path_factory.mktemp("push"))
    try:
        stack.engine.start()
        yield stack
    finally:
        stack.engine.shutdown()


@pytest.fixture
def stack(running: Stack) -> Stack:
    """With trainers of its own, and its first push behind it: in full, to a copy of the weights."""
    running.start_trainers(is_delta=True)
    assert running.push()["perf/update_weights_density"] == 1.0
    return running


def _spoil(folder: Path) -> None:
    spoil(sorted(folder.glob("*.safetensors"))[0])


def test_full_and_delta(stack: Stack) -> None:
    stack.assert_serves()
    full = sum(path.stat().st_size for path in (stack.local / "weights").glob("*.safetensors"))
    for local, full_hosts in ((stack.local, 0), (stack.folder / "other", 1), (stack.local, 1), (stack.local, 0)):
        stack.train()
        metrics = stack.push(local)
        stack.assert_serves()
        assert 0 < metrics["perf/update_weights_density"] < 0.5
        assert metrics["sync/full_hosts"] == full_hosts, "a host that was left out of a push has no base"
        wire = metrics["perf/update_weights_wire_bytes"] - full_hosts * full
        assert 0 < wire < 0.7 * full
        prepare_s, pause_s = metrics["sync/prepare_s"], metrics["sync/pause_s"]
        assert prepare_s > 0 and pause_s > 0 and prepare_s + pause_s <= metrics["perf/time_sync_s"]
        assert set(stack.versions()) == {f"weight_v{stack.version:06d}{s}" for s in ("", "_full")[: 1 + full_hosts]}
    drop_files([Threaded(stack.ranks)], [stack.target], str(stack.local))
    assert stack.versions() == []
    assert not stack.local.exists()


def test_full_without_a_copy(running: Stack) -> None:
    running.start_trainers(is_delta=False)
    for _ in range(2):
        running.push(is_copied=False, keep_files=True)
        running.assert_serves()
        running.train()
    assert running.versions()[-2:] == [f"weight_v{version:06d}" for version in (running.version - 1, running.version)]
    with pytest.raises(RuntimeError, match=r"the host of engine 0: .*part-00000.safetensors is damaged"):
        running.push(is_copied=False, on_way=_spoil)
    running.assert_serves()
    running.push(is_copied=False)
    running.assert_serves()


def test_a_request_goes_on_under_the_new_weights(stack: Stack) -> None:
    """It is generated while the files are made, stands still while they are loaded, and keeps what it has."""
    stack.train()
    with ThreadPoolExecutor() as pool:
        request = pool.submit(stack.generate, 1500)
        deadline, loads = time.monotonic() + 60, stack.engine.url + "/v1/loads"
        while not sum(load["num_running_reqs"] for load in call("GET", loads, api_key="key")["loads"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stack.push(pause_mode="retract")
        answer = request.result()["meta_info"]
    pairs = answer["output_token_logprobs"]
    assert len(pairs) == 1500
    spans = answer["weight_versions"]
    assert [str(span["version"]) for span in spans] == [str(stack.version - 1), str(stack.version)]
    expected = stack.log_probs([token for _, token, _ in pairs])
    # Retracted: also what came after the push has only the new weights' keys and values before it.
    np.testing.assert_allclose([log_prob for log_prob, _, _ in pairs[-50:]], expected[-50:], atol=1e-4)
    stack.assert_serves()


@pytest.mark.parametrize("where", ["on the way", "engine"])
def test_a_push_that_fails_leaves_the_weights_and_the_next_one_works(
    stack: Stack, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.train()
    pull = stack.engine.pull_weights

    def pull_and_lose(*args: Any) -> str | None:
        found = pull(*args)
        shutil.rmtree(stack.local / "weights")
        return found

    if where == "on the way":
        options, message = {"on_way": _spoil}, r"the host of engine 0: .* is damaged"  # delta and full version alike
    else:
        options, message = {}, r"engine 0: load: .*/update_weights_from_disk answered 400"
        monkeypatch.setattr(stack.engine, "pull_weights", pull_and_lose)
    with pytest.raises(RuntimeError, match=message):
        stack.push(**options)
    stack.assert_serves()  # and so goes on after the pause
    monkeypatch.undo()
    stack.push()
    stack.assert_serves()


def test_an_engine_that_dies_and_starts_again(stack: Stack) -> None:
    """It dies when the files are written. The new one has the checkpoint's weights; its host's copy is of use."""
    stack.train()
    pid = stack.engine._server.pid
    with pytest.raises(RuntimeError, match=r"engine 0: pause: .*killed by SIGKILL"):
        stack.push(on_way=lambda folder: os.kill(pid, signal.SIGKILL))
    stack.engine.shutdown()
    stack.engine.start()
    assert stack.engine.weight_version() == "0"
    metrics = stack.push()
    assert (metrics["perf/update_weights_density"], metrics["sync/full_hosts"]) == (0.0, 0.0)
    stack.assert_serves()
