"""Score saved samples again, token by token, under the version of the weights that each token claims.

The scorer is transformers in float32. A token's log-prob under the weights of its version, with all tokens before it,
must be the engine's. This is exact where the engines compute the KV cache of running samples again at a push (retract)
or have none then (drain). Where they keep the cache (in_place), the tokens after a push see keys and values of older
weights: then only a sample's tokens up to its first change of version are compared, and the others are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionrl.observe.rollouts import list_rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BOUND = 1e-4
_BATCH = 32  # samples that are scored at once
_SHOWN = 5  # faults that are reported of one run


@dataclass(frozen=True)
class SavedSample:
    """One line of a rollout's file."""

    where: str  # it stands: file and line
    trained_by: int  # version of the weights that it trained
    tokens: list[int]  # prompt and response
    log_probs: np.ndarray  # [n] of the response, by the engine
    versions: np.ndarray  # [n] that the tokens claim; -1 where none is known
    mask: np.ndarray  # [n] trained tokens

    @property
    def sampled(self) -> np.ndarray:
        """[n] bool: tokens of the model; those of a tool have mask 0 and log-prob 0."""
        return (self.mask > 0) | (self.log_probs != 0)

    @property
    def spans(self) -> bool:
        """Whether several versions sampled it."""
        return len(set(self.versions[self.sampled].tolist())) > 1


@dataclass
class Rescored:
    """The comparison of one run's samples.

    stale_tokens     trained tokens that an older version sampled than the one that they trained
    spanning         samples that several versions sampled
    unchecked        sampled tokens that were left out, with a KV cache of older weights
    largest_gap      between a saved log-prob and the scorer's, under the version that the token claims
    other_version    median over samples with stale tokens: the largest gap, had they been of the version that they
                     trained. It shows that a wrong version would be seen; 0 where no token is stale
    max_staleness    in versions
    faults           one text a fault; empty where all is well
    """

    samples: int = 0
    tokens: int = 0
    stale_tokens: int = 0
    spanning: int = 0
    unchecked: int = 0
    largest_gap: float = 0.0
    other_version: float = 0.0
    max_staleness: int = 0
    faults: list[str] = field(default_factory=list)

    def told(self) -> list[str]:
        """The first faults, and the number of the others."""
        more = len(self.faults) - _SHOWN
        return self.faults[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])


def saved_samples(run_dir: Path, update_weights_interval: int = 1) -> list[SavedSample]:
    """Return the trained samples of a run; version v of its weights is that after v steps."""
    saved = []
    for file in list_rollouts(run_dir, "train"):
        trained_by = (file.step - 1) // update_weights_interval * update_weights_interval
        for line, row in enumerate(file.rows()):
            saved.append(_sample(row, f"{file.path.name}:{line + 1}", trained_by))
    return saved


def _sample(row: Mapping[str, Any], where: str, trained_by: int) -> SavedSample:
    count = int(row["response_length"])
    log_probs, versions, mask = (row.get(name) for name in ("rollout_log_probs", "weight_versions", "loss_mask"))
    return SavedSample(
        where,
        trained_by,
        list(row["tokens"]),
        np.zeros(count) if log_probs is None else np.array(log_probs, float),  # null becomes NaN
        np.full(count, -1) if versions is None else np.array(versions, int),
        np.ones(count, int) if mask is None else np.array(mask, int),
    )


def pushed_versions(run_dir: Path) -> dict[int, Path]:
    """Return the files of each version, of a run with the disk transport and --update-weight-disk-keep-files."""
    return {int(path.name.removeprefix("weight_v")): path for path in (run_dir / "weights").glob("weight_v??????")}


def checkpoint_versions(run_dir: Path, model: Path, update_weights_interval: int = 1) -> dict[int, Path]:
    """Convert the checkpoints of a run with --save-interval 1; version 0 is --hf-checkpoint `model`.

    Of adapters: the weights with them added.
    """
    from fusionrl.cli import export
    from fusionrl.models.trainable import saved_in
    from tools.convert import to_hf

    models = {0: model}
    for checkpoint in sorted((run_dir / "checkpoints").glob("step_??????")):
        version = int(checkpoint.name.removeprefix("step_"))
        if version % update_weights_interval == 0:
            models[version] = run_dir / "versions" / str(version)
            if models[version].is_dir():
                continue
            description = json.loads((checkpoint / "trainer" / "fusionrl.json").read_text())
            if saved_in(description) is not None:
                models[version].parent.mkdir(exist_ok=True)
                assert export.run([str(checkpoint), str(models[version]), "--merge"]) == 0
            else:
                to_hf(str(model), str(checkpoint), models[version], "fp32")
    return models


def rescore(
    samples: Sequence[SavedSample],
    weights: Mapping[int, Path],
    *,
    max_staleness: int,
    update_weights_interval: int = 1,
    keeps_cache: bool = False,
    bound: float = BOUND,
) -> Rescored:
    """Compare every sampled token with transformers under its version, and every trained one with `max_staleness`.

    weights      version → Hugging Face folder of its weights
    keeps_cache  the engines kept the KV cache of running samples at a push
    """
    result = Rescored(samples=len(samples))
    for sample in samples:
        _count(sample, result, weights, max_staleness, update_weights_interval)
    log_probs = {version: _log_probs_of(samples, version, weights) for version in sorted(weights)}
    differences = []
    for number, sample in enumerate(samples):
        expected, checked = _expected(sample, log_probs, number, keeps_cache)
        result.unchecked += int((sample.sampled & ~checked).sum())
        gaps = np.where(checked, np.abs(sample.log_probs - expected), 0.0)
        result.largest_gap = max(result.largest_gap, float(np.nan_to_num(gaps, nan=np.inf).max(initial=0.0)))
        result.faults += [
            f"{sample.where}: token {i} of version {sample.versions[i]} has log-prob {sample.log_probs[i]:.6f},"
            f" transformers' is {expected[i]:.6f}"
            for i in np.flatnonzero(~(gaps <= bound))  # also NaN
        ]
        stale = checked & (sample.versions < sample.trained_by)
        trained = log_probs.get(sample.trained_by, {}).get(number)
        if stale.any() and trained is not None:
            differences.append(float(np.abs(sample.log_probs - trained)[stale].max()))
    result.other_version = float(np.median(differences)) if differences else 0.0
    return result


def _count(
    sample: SavedSample, result: Rescored, weights: Mapping[int, Path], max_staleness: int, update_weights_interval: int
) -> None:
    """Count the sample's tokens, and note versions that cannot be."""
    sampled = sample.sampled
    result.tokens += int(sampled.sum())
    result.spanning += sample.spans
    for version in sorted(set(sample.versions[sampled].tolist()) - set(weights)):
        result.faults.append(f"{sample.where}: claims version {version}, which no engine had")
    if len(trained := sample.versions[sample.mask > 0]):
        staleness = (sample.trained_by - int(trained.min())) // update_weights_interval
        result.stale_tokens += int((trained < sample.trained_by).sum())
        result.max_staleness = max(result.max_staleness, staleness)
        if staleness > max_staleness:
            result.faults.append(
                f"{sample.where}: a token of version {trained.min()} trained version {sample.trained_by}, at most"
                f" {max_staleness} versions are allowed"
            )
        if (future := int(trained.max())) > sample.trained_by:
            result.faults.append(
                f"{sample.where}: a token of version {future} trained version {sample.trained_by}, which is older"
            )


def _expected(
    sample: SavedSample, log_probs: Mapping[int, Mapping[int, np.ndarray]], number: int, keeps_cache: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scorer's log-probs of the response, each under its token's version, and which are to be compared."""
    expected, checked = np.full(len(sample.versions), np.nan), np.zeros(len(sample.versions), bool)
    for version in set(sample.versions[sample.sampled].tolist()) & set(log_probs):
        here = sample.sampled & (sample.versions == version)
        expected[here], checked[here] = log_probs[version][number][here], True
    if keeps_cache and (changes := np.flatnonzero(np.diff(sample.versions))).size:
        checked[changes[0] + 1 :] = False
    return expected, checked


def _log_probs_of(samples: Sequence[SavedSample], version: int, weights: Mapping[int, Path]) -> dict[int, np.ndarray]:
    """Number of a sample → [n] log-probs of its response under one version; of samples that have to do with it."""
    concerned = [
        number
        for number, sample in enumerate(samples)
        if version in sample.versions or (version == sample.trained_by and sample.versions.min(initial=0) < version)
    ]
    if not concerned:
        return {}
    model = load_model(weights[version])
    by_number: dict[int, np.ndarray] = {}
    concerned.sort(key=lambda number: len(samples[number].tokens))
    for start in range(0, len(concerned), _BATCH):
        numbers = concerned[start : start + _BATCH]
        scored = response_log_probs(model, [(samples[n].tokens, len(samples[n].versions)) for n in numbers])
        by_number |= dict(zip(numbers, scored, strict=True))
    return by_number


def load_model(folder: Path) -> PreTrainedModel:
    """Return transformers' model of a Hugging Face folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def response_log_probs(model: PreTrainedModel, texts: Iterable[tuple[Sequence[int], int]]) -> list[np.ndarray]:
    """Return the log-probs of the last tokens of each text: (tokens, number of them)."""
    import torch

    texts = list(texts)
    longest = max(len(tokens) for tokens, _ in texts)
    padded = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in texts])
    with torch.no_grad():  # attention looks back only, so what stands behind a text does not matter
        log_probs = model(padded).logits[:, :-1].log_softmax(-1).gather(-1, padded[:, 1:, None])[..., 0]
    return [
        row[len(tokens) - 1 - count : len(tokens) - 1].double().numpy()
        for row, (tokens, count) in zip(log_probs, texts, strict=True)
    ]
