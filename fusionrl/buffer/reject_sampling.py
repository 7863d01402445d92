"""Output of `--mode reject-sampling`: accepted samples in the form that `--mode sft` reads, and statistics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionrl.base.files import flush_open
from fusionrl.config.config import Config
from fusionrl.config.run_parts import has_own_rollout
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample, Status, response_mask
from fusionrl.data.supervised import token_columns
from fusionrl.observe.formats import json_line, write_atomically
from fusionrl.rollout.weight_versions import num_unsampled

IMAGES_COLUMN = "images"


METRICS = """
rollout/considered | samples | Samples of the rollout. | --mode reject-sampling
rollout/unfinished | samples | Not accepted: truncated, aborted or failed, or no token to train on. | --mode
    reject-sampling
rollout/unsampled | samples | Not accepted: trained tokens occur in no response of the engines (a tool's text without
    a mask). | --mode reject-sampling
rollout/below_threshold | samples | Not accepted: reward below --reject-sampling-threshold. | --mode reject-sampling
rollout/duplicates | samples | Not accepted: the same answer to the same prompt is in the file. | --mode
    reject-sampling
rollout/surplus | samples | Not accepted: the prompt has --reject-sampling-per-prompt better ones. | --mode
    reject-sampling
rollout/accepted | samples | Written to --reject-sampling-output. | --mode reject-sampling
"""


class AcceptedSamples:
    """A file of accepted samples, a JSON line each; `<file>.summary.json` counts the outcomes of all samples, in total
    and for each step (the number of finished rollouts).

    The file holds no answer to a prompt twice, whatever the rollout, and no rollout twice, whatever the attempt. Images
    are in `<file>.images`, and in the column `images` of a row (--multimodal-keys '{"image": "images"}').
    """

    def __init__(self, path: Path, threshold: float, per_prompt: int, keeps_tokens: bool = False) -> None:
        """Accept, of each prompt, the `per_prompt` best samples with a reward of at least `threshold`.

        keeps_tokens  samples with a mask are written with their tokens, also where the mask is 1 throughout
        """
        self.path, self.threshold, self.per_prompt, self.keeps_tokens = path, threshold, per_prompt, keeps_tokens
        self.summary_path = path.with_name(path.name + ".summary.json")
        self._images = path.with_name(path.name + ".images")
        self._known: set[bytes] | None = None  # answers in the file; None: not read yet
        self._is_clean = True  # False: rows of rollouts that are made again have not been dropped yet

    @classmethod
    def of(cls, config: Config, run_dir: Path, attempt: int) -> AcceptedSamples:
        """Make that of a run; a later attempt drops what it makes again before it adds its first rollout.

        A user's function may make an answer in several turns with nothing between them: then all masks are kept.
        """
        flags, rollout = config.reject_sampling, config.rollout
        path = Path(flags.reject_sampling_output or run_dir / "accepted.jsonl")
        makes_samples = rollout.custom_generate_function_path or rollout.rollout_sample_hook_path
        is_by_user = bool(makes_samples) or has_own_rollout(config)
        accepted = cls(path, flags.reject_sampling_threshold, flags.reject_sampling_per_prompt, is_by_user)
        accepted._is_clean = attempt == 1
        return accepted

    def add(self, rollout_id: int, samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, int]:
        """Append what is accepted of a rollout. Counts of its samples:

        considered        all of them
        unfinished        truncated, aborted or failed, or without a token to train on
        unsampled         trained on tokens that no engine sampled: a function put a tool's text in, and set no mask
        below_threshold   finished, but with a lower reward
        duplicates        good, but the file has the same answer to the same prompt
        surplus           good, but the prompt has `per_prompt` better ones
        accepted          written
        """
        if not self._is_clean:
            self.forget_after(rollout_id - 1)
            self._is_clean = True
        counts = dict.fromkeys(("unfinished", "unsampled", "below_threshold", "duplicates", "surplus"), 0)
        counts = {"considered": len(samples), **counts}
        known = self._answers()
        groups: dict[Any, list[tuple[float, Sample]]] = {}
        for sample, reward in zip(samples, rewards, strict=True):
            is_untrained = sample.response_length > 0 and not response_mask(sample).any()
            if sample.status != Status.COMPLETED or is_untrained:
                counts["unfinished"] += 1
            elif num_unsampled(sample):  # as an answer of the assistant, it would be a tool's or a user's
                counts["unsampled"] += 1
            elif reward < self.threshold:
                counts["below_threshold"] += 1
            else:
                groups.setdefault(sample.group_index, []).append((reward, sample))
        rows: list[dict[str, Any]] = []
        new: set[bytes] = set()
        for group in groups.values():
            taken = 0
            for reward, sample in sorted(group, key=lambda pair: -pair[0]):
                row = _row(rollout_id, sample, reward, self.keeps_tokens)
                if sample.image_spans:
                    row[IMAGES_COLUMN] = [f"{self._images.name}/{image.key}.png" for _, image in sample.image_spans]
                answer = _digest(row)
                if answer in known or answer in new:
                    counts["duplicates"] += 1
                elif taken == self.per_prompt:
                    counts["surplus"] += 1
                else:
                    new.add(answer)
                    rows.append(row)
                    IMAGES.save((image for _, image in sample.image_spans), self._images)
                    taken += 1
        counts["accepted"] = len(rows)
        with self.path.open("ab") as out:
            out.writelines(map(json_line, rows))
            out.flush()
            flush_open(out.fileno())  # a checkpoint says soon that these are done
        known |= new  # after the write: an answer that could not be written must not count as a duplicate later
        self._write_summary(self._steps() | {str(rollout_id + 1): counts})
        return counts

    def forget_after(self, rollout_id: int) -> None:
        """Drop what later rollouts brought, and a line that a kill cut off: a resumed run makes them again."""
        self._known = None
        if self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            new_lines = [
                line for line in lines if line.endswith("\n") and json.loads(line).get("rollout_id", -1) <= rollout_id
            ]
            write_atomically(self.path, "".join(new_lines))
        steps = {step: counts for step, counts in self._steps().items() if int(step) <= rollout_id + 1}
        if self.summary_path.is_file():
            self._write_summary(steps)

    def _answers(self) -> set[bytes]:
        if self._known is None:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
            self._known = {_digest(json.loads(line)) for line in lines}
        return self._known

    def _steps(self) -> dict[str, dict[str, int]]:
        if not self.summary_path.is_file():
            return {}
        summary = json.loads(self.summary_path.read_text(encoding="utf-8"))
        if "rollouts" in summary:  # of an earlier version, by rollout_id
            return {str(int(number) + 1): counts for number, counts in summary["rollouts"].items()}
        return summary["steps"]

    def _write_summary(self, steps: dict[str, dict[str, int]]) -> None:
        names = dict.fromkeys(name for counts in steps.values() for name in counts)
        total = {name: sum(counts.get(name, 0) for counts in steps.values()) for name in names}
        summary = {"threshold": self.threshold, "per_prompt": self.per_prompt, "total": total, "steps": steps}
        write_atomically(self.summary_path, json.dumps(summary, indent=1) + "\n")


def _row(rollout_id: int, sample: Sample, reward: float, keeps_tokens: bool) -> dict[str, object]:
    """One line of the file. Where parts of the answer are not trained on, it has tokens, and no `messages`: as one
    message of the assistant, all of it would be."""
    named = {"step": rollout_id + 1, "rollout_id": rollout_id}
    row: dict[str, Any] = {**named, "prompt": sample.prompt, "response": sample.response}
    is_whole = bool(response_mask(sample).all())
    if sample.messages is not None and is_whole:
        row["messages"] = [*sample.messages, {"role": "assistant", "content": sample.response}]
    if not is_whole or (keeps_tokens and sample.array("loss_mask") is not None):
        row |= token_columns(sample)
    return row | {"reward": reward, "label": sample.label, "metadata": sample.metadata}


def _digest(row: Mapping[str, object]) -> bytes:
    parts = [row["prompt"], row["response"], *([row[IMAGES_COLUMN]] if IMAGES_COLUMN in row else [])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
