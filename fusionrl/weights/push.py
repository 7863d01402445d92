"""The protocol of a weight push, run by the driver: prepare, pause, begin, transfer, end, continue, verify.

The engines stand still from pause to continue. Whatever fails, they are released again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.engines.client import GenerateClient
from fusionrl.weights.calls import wait_all
from fusionrl.weights.plan import EngineTarget, Feed

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 8
_RELEASE_TIMEOUT_S = 30.0


class WeightMismatch(RuntimeError):
    """A verified push left an engine with other weights than the trainers'."""


def push_weights(
    trainers: Sequence[Any],
    targets: Sequence[EngineTarget],
    feeds: Sequence[Feed],
    *,
    version: int,
    transport: str,
    pause_mode: str,
    timeout_s: float,
) -> dict[str, float]:
    """Bring every engine to the trainers' weights, stamped with `version`. Returns perf/… and sync/… metrics:

    sync/prepare_s   plan, groups, buffers and the first gathers, while the engines still generate
    sync/pause_s     the engines stand still
    sync/transfer_s  part of it: from the first byte sent to the last answer
    sync/bytes       of the weights, each counted once
    sync/calls       requests to engines that carried weights
    sync/gb_per_s    1e9 bytes that all engines together received a second of the transfer

    Raises:
        RuntimeError: an engine or a trainer failed, or `timeout_s` seconds passed; names it. The engines were told to
        go on (with whatever they hold), so that they can be pushed to again or shut down.
    """
    start = time.perf_counter()

    def left() -> float:
        return max(1.0, timeout_s - (time.perf_counter() - start))

    def ask_trainers(method: str, *args: Any) -> list[Any]:
        calls = [(f"trainer {rank}", getattr(t, method).remote(*args)) for rank, t in enumerate(trainers)]
        return wait_all(calls, left())

    def ask_engines(method: str, *args: Any) -> None:
        calls = [(f"engine {t.index}: {method}", getattr(t.handle, method).remote(*args)) for t in targets]
        wait_all(calls, left())

    ask_trainers("prepare_push", list(targets), transport)
    paused = time.perf_counter()
    not_released: list[str] = []
    try:
        ask_engines("pause", pause_mode)
        try:
            ask_engines("begin_weight_update")
            sent = ask_trainers("push_weights", list(targets), list(feeds), version, transport)
        finally:
            not_released += _release(targets, "end_weight_update")
    finally:
        not_released += _release(targets, "resume")
    if not_released:
        raise RuntimeError("weight push: " + "; ".join(not_released))
    end = time.perf_counter()
    return {
        "perf/time_sync_s": end - start,
        "sync/prepare_s": paused - start,
        "sync/pause_s": end - paused,
        "sync/version": float(version),
        **_totals(sent, len(targets)),
    }


def _totals(sent: Sequence[dict[str, Any]], num_engines: int) -> dict[str, float]:
    """Sums over the trainers' reports; of the clocks, which are one machine's or nearly so, the ends."""
    num_bytes = float(sum(report["bytes"] for report in sent))
    ends = [report for report in sent if "last_s" in report]
    seconds = max(report["last_s"] for report in ends) - min(report["first_s"] for report in ends)
    return {
        "sync/transfer_s": seconds,
        "sync/bytes": num_bytes,
        "sync/buckets": float(sum(report["buckets"] for report in sent)),
        "sync/calls": float(sum(report["calls"] for report in sent)),
        "sync/gb_per_s": num_bytes * num_engines / seconds / 1e9,
    }


def _release(targets: Sequence[EngineTarget], method: str) -> list[str]:
    """Tell every engine, also one of which nobody knows how far it came; returns what went wrong."""
    calls = [(f"engine {target.index}: {method}", getattr(target.handle, method).remote()) for target in targets]
    failed = []
    for call in calls:
        try:
            wait_all([call], _RELEASE_TIMEOUT_S)
        except RuntimeError as error:
            # Where an error broke the push it is on its way up; a dead engine cannot be released.
            logger.warning("weight push: %s", error)
            failed.append(str(error))
    return failed


# ---------------------------------------------------------------------------------------------- verification
def verify_push(
    trainers: Sequence[Any],
    targets: Sequence[EngineTarget],
    urls: Sequence[str],
    *,
    api_key: str | None,
    vocab_size: int,
    version: int,
    temperature: float,
    tolerance: float,
    check_bytes: bool,
) -> dict[str, float]:
    """Compare checksums of all tensors, and log-probs of a probe, between the trainers and every engine.

    Raises:
        WeightMismatch: names the engine and the tensors, or the difference of the log-probs.
    """
    if check_bytes:
        _verify_checksums(trainers, targets)
    worst = 0.0
    for target, url in zip(targets, urls, strict=True):
        shard, engine_log_probs, versions = _probe(url, api_key, vocab_size, temperature)
        if any(v != version for v in versions):
            raise WeightMismatch(f"engine {target.index}: stamped version {versions} after a push of version {version}")
        trainer_log_probs = np.concatenate(ray.get([t.score.remote(shard) for t in trainers])[0])
        difference = float(np.abs(trainer_log_probs - engine_log_probs).mean())
        worst = max(worst, difference)
        if not difference <= tolerance:
            raise WeightMismatch(
                f"engine {target.index}: after the push its log-probs differ from the trainers' by {difference:.2e} on"
                f" average, more than --verify-tolerance {tolerance:.1e}"
            )
    return {"sync/verify_logprob_diff": worst}


def compare_checksums(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Names of the tensors that differ, are missing in the engine, or that the engine has beyond those sent."""
    names = sorted(expected.keys() | found.keys())
    return [name for name in names if expected.get(name) != found.get(name)]


def _verify_checksums(trainers: Sequence[Any], targets: Sequence[EngineTarget]) -> None:
    sizes = sorted({target.tp_size for target in targets})
    expected = {size: ray.get([t.weight_checksums.remote(size) for t in trainers])[0] for size in sizes}
    for target in targets:
        wanted = expected[target.tp_size]
        found = ray.get(target.handle.weight_checksums.remote()) if wanted is not None else None
        if wanted is None or found is None:  # of this model, or of an engine whose version cannot report them
            logger.warning("engine %d: there are no checksums; its push is verified by log-probs alone", target.index)
            continue
        for rank, (want, have) in enumerate(zip(wanted, found, strict=True)):
            wrong = compare_checksums(want, have)
            if wrong:
                shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
                raise WeightMismatch(f"engine {target.index}, rank {rank}: {len(wrong)} tensors differ: {shown}")


def _probe(
    url: str, api_key: str | None, vocab_size: int, temperature: float
) -> tuple[TrainShard, np.ndarray, list[int]]:
    """Let the engine at `url` generate a few tokens; as a shard for the trainers, with the engine's log-probs."""
    prompt = np.random.default_rng(7).integers(0, vocab_size, 16).astype(np.int32)

    async def ask() -> Any:
        async with GenerateClient(url, api_key, timeout_s=300.0, max_connections=1) as client:
            params = {"max_new_tokens": _PROBE_TOKENS, "temperature": temperature, "ignore_eos": True}
            return await client.generate(
                {"input_ids": prompt.tolist(), "sampling_params": params, "return_logprob": True}
            )

    answer = asyncio.run(ask())
    tokens = np.concatenate([prompt, answer.tokens]).astype(np.int32)
    count = len(answer.tokens)
    one = np.zeros(1, np.float32)
    shard = TrainShard(
        rollout_id=-1,
        total_lengths=np.array([len(tokens)], np.int32),
        response_lengths=np.array([count], np.int32),
        fields={
            "tokens": tokens,
            "loss_mask": np.ones(count, np.float32),
            "rewards": one,
            "raw_rewards": one,
            "sample_index": np.zeros(1, np.int64),
            "group_index": np.zeros(1, np.int64),
            "truncated": np.zeros(1, np.bool_),
        },
        steps=[TrainStep([[0]], count, 1)],
        metadata=[{}],
    )
    versions = [int(version) for version, _ in answer.weight_versions]
    return shard, np.asarray(answer.log_probs), versions
