"""Verification of a weight push, run by the driver: checksums of tensors, and log-probs of a probe, on both sides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.engines.answers import Generation
from fusionrl.engines.client import GenerateClient
from fusionrl.models.vision import NAMES as TOWER
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.weights.remote_calls import get

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_PROBE_PROMPTS = (3, 8, 16, 21)  # tokens of each
_PROBE_TOKENS = 8
_COMPUTED = (".rotary_emb.axis_map",)  # what an engine computes of config.json alone
_NUM_SHOWN = 5


class WeightMismatch(RuntimeError):
    """A verified push left an engine with other weights than the trainers'."""


METRICS = """
sync/verify_logprob_diff | nats | Mean |log p(trainer) - log p(engine)| of a few tokens after the push, of the worst
    engine. | --verify-weights
sync/verify_logprob_diff_max | nats | The largest of these differences. | --verify-weights
sync/verify_tensors | tensors | Tensors of the engines whose checksums equal the trainers'. | --verify-weights
"""


@dataclass
class Verification:
    """One verification of a push, in three steps, between which memory may change hands.

    The prompts of the probe are always the same, so that an engine that kept what it had cached of the weights before
    is found as well. `tolerance` bounds the mean |log-prob difference|. Where engines may lay tensors out in their own
    way (not `is_exact`: on GPUs) different checksums are logged, and count if the log-probs differ as well. No
    prompt has the `placeholder`, for which an engine may want an image (-1: there is none). Of several `adapters` each
    is asked.
    """

    trainers: Sequence[ActorHandle]
    targets: Sequence[EngineTarget]
    urls: Sequence[str]
    _: KW_ONLY
    api_key: str | None
    vocab_size: int
    version: int
    temperature: float
    tolerance: float
    is_exact: bool
    placeholder: int = -1
    adapters: Sequence[str | None] = (None,)
    _num_tensors: int = field(default=0, init=False)
    _wrong: dict[int, str] = field(default_factory=dict, init=False)
    _answers: dict[str | None, list[list[Generation]]] = field(default_factory=dict, init=False)

    def _prompts(self) -> list[np.ndarray]:
        random = np.random.default_rng(7)
        prompts = [random.integers(0, self.vocab_size, length).astype(np.int32) for length in _PROBE_PROMPTS]
        return [np.where(prompt == self.placeholder, 0, prompt) for prompt in prompts]

    def compare_tensors(self) -> None:
        """Compare the checksums of all tensors; both sides have their weights."""
        self._num_tensors, self._wrong = _compare_checksums(self.trainers, self.targets)
        for text in self._wrong.values():
            if self.is_exact:
                raise WeightMismatch(text)
            logger.warning("%s (as the engine lays them out; the log-probs decide)", text)

    def ask_probe(self) -> None:
        """Let each engine answer a few prompts; the engines are whole."""
        params = {"max_new_tokens": _PROBE_TOKENS, "temperature": self.temperature, "ignore_eos": True}
        for name in self.adapters:
            payload = {"sampling_params": params, "return_logprob": True} | ({"lora_path": name} if name else {})
            answered = asyncio.run(_ask(self.urls, self.api_key, self._prompts(), self.vocab_size, payload))
            self._answers[name] = answered
        each = [pair for answered in self._answers.values() for pair in zip(self.targets, answered, strict=True)]
        for target, answers in each:
            # The version may be a name, which no push gave.
            versions = sorted({v for answer in answers for v, _ in answer.weight_versions}, key=str)
            if versions != [self.version]:
                raise WeightMismatch(
                    f"engine {target.index}: stamped version {versions} after a push of version {self.version}"
                )

    def judge(self) -> dict[str, float]:
        """Compare the log-probs of the answers; the trainers have their weights.

        Returns sync/verify_logprob_diff (of the worst engine), sync/verify_logprob_diff_max (of one token), and
        sync/verify_tensors, the tensors of all engine ranks whose checksums were found equal.
        """
        each, scored = list[tuple[EngineTarget, list[Generation]]](), list[np.ndarray]()
        for name, answered in self._answers.items():
            shard = replace(_shard(self._prompts(), answered), adapter=name)
            scored += get([trainer.score.remote(shard, None, True) for trainer in self.trainers])[0]
            each += zip(self.targets, answered, strict=True)
        means, largest = [], 0.0
        for target, answers in each:
            trainer_log_probs, scored = scored[: len(answers)], scored[len(answers) :]
            differences = np.abs(
                np.concatenate(trainer_log_probs) - np.concatenate([answer.log_probs for answer in answers])
            )
            means.append(float(differences.mean()))
            largest = max(largest, float(differences.max()))
            if not means[-1] <= self.tolerance:
                raise WeightMismatch(
                    f"engine {target.index}: after the push its log-probs differ from the trainers' by {means[-1]:.2e}"
                    f" on average, more than --verify-tolerance {self.tolerance:.1e}"
                    + (f"; {self._wrong[target.index]}" if target.index in self._wrong else "")
                )
        return {
            "sync/verify_logprob_diff": max(means),
            "sync/verify_logprob_diff_max": largest,
            "sync/verify_tensors": float(self._num_tensors),
        }


def compare_checksums(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Names of the tensors that differ, are missing in the engine, or that the engine has beyond those sent.

    Trainers of a run without images have no vision tower; the engine's is that of its folder.
    """
    is_blind = not any(name.startswith(TOWER) for name in expected)
    computed = {name for name in actual.keys() - expected.keys() if name.endswith(_COMPUTED)}
    computed |= {name for name in actual if name.startswith(TOWER) and is_blind}
    names = sorted((expected.keys() | actual.keys()) - computed)
    return [name for name in names if expected.get(name) != actual.get(name)]


def _compare_checksums(trainers: Sequence[ActorHandle], targets: Sequence[EngineTarget]) -> tuple[int, dict[int, str]]:
    """The number of tensors that are equal, and for each engine that has other ones which they are."""
    sizes = sorted({target.tp_size for target in targets})
    expected = {size: get([t.weight_checksums.remote(size) for t in trainers])[0] for size in sizes}
    num_equal, wrong = 0, {}
    for target in targets:
        actual = get(target.handle.weight_checksums.remote())
        if actual is None:  # the engine's version cannot report them
            logger.warning("engine %d: it has no checksums; its push is verified by log-probs alone", target.index)
            continue
        for rank, (want, have) in enumerate(zip(expected[target.tp_size], actual, strict=True)):
            names = compare_checksums(want, have)
            num_equal += len(want.keys() - set(names))
            if names and target.index not in wrong:
                more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
                first_names = ", ".join(names[:_NUM_SHOWN])
                wrong[target.index] = (
                    f"engine {target.index}, rank {rank}: {len(names)} tensors differ: {first_names}{more}"
                )
    return num_equal, wrong


async def _ask(
    urls: Sequence[str],
    api_key: str | None,
    prompts: Sequence[np.ndarray],
    vocab_size: int,
    payload: Mapping[str, object],
) -> list[list[Generation]]:
    """For each engine its answers of a few tokens to the prompts, each asked with the `payload`."""

    async def ask(url: str) -> list[Generation]:
        async with GenerateClient(url, api_key, 300.0, len(prompts), vocab_size=vocab_size) as client:
            asked = [client.generate({"input_ids": prompt.tolist(), **payload}) for prompt in prompts]
            return list(await asyncio.gather(*asked))

    return list(await asyncio.gather(*(ask(url) for url in urls)))


def _shard(prompts: Sequence[np.ndarray], answers: Sequence[Sequence[Generation]]) -> TrainShard:
    """All engines' answers, one after the other, for the trainers to score; each a micro-batch."""
    tokens = [
        np.concatenate([p, a.tokens]).astype(np.int32)
        for engine_answers in answers
        for p, a in zip(prompts, engine_answers, strict=True)
    ]
    counts = np.array([len(answer.tokens) for engine_answers in answers for answer in engine_answers], np.int32)
    rewards, numbers = np.zeros(len(tokens), np.float32), np.arange(len(tokens))
    return TrainShard(
        rollout_id=-1,
        total_lengths=np.array([len(ids) for ids in tokens], np.int32),
        response_lengths=counts,
        fields={
            "tokens": np.concatenate(tokens),
            "loss_mask": np.ones(int(counts.sum()), np.float32),
            "rewards": rewards,
            "raw_rewards": rewards,
            "sample_index": numbers,
            "group_index": numbers,
            "truncated": np.zeros(len(tokens), np.bool_),
        },
        steps=[TrainStep([[i] for i in range(len(tokens))], int(counts.sum()), len(tokens))],
        metadata=[{} for _ in tokens],
    )
