"""Data sources: where prompts come from. `--data-source-path` names a class of a user's own with these methods."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import numpy as np

from fusionrl.data.prompts import PromptColumns, load_conversations, load_prompts
from fusionrl.data.sample import Sample
from fusionrl.rollout.sglang_rollout import load_tokenizer


class RolloutDataSource:
    """Prompts of one file, epoch after epoch, shuffled anew in each; and groups that were handed back.

    The order of an epoch is a function of seed and epoch alone, so the cursor (epoch, offset) is all that a
    checkpoint needs besides the groups that were handed back.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        columns = PromptColumns(
            args.input_key,
            args.label_key,
            args.metadata_key,
            args.tool_key,
            args.apply_chat_template,
            args.apply_chat_template_kwargs,
            args.rollout_max_prompt_len,
        )
        if args.mode == "sft":
            loaded = load_conversations(args.prompt_data, columns)
        else:
            loaded = load_prompts(args.prompt_data, load_tokenizer(args.hf_checkpoint), columns)
        self.prompts = loaded.samples
        self.num_too_long = loaded.num_too_long
        self.epoch = 0
        self.offset = 0
        self.num_groups = 0
        self.num_samples = 0
        self.returned: list[list[Sample]] = []
        self._order = self._epoch_order()
        self._fingerprint = _fingerprint(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def _epoch_order(self) -> np.ndarray:
        if not self.args.rollout_shuffle:
            return np.arange(len(self.prompts))
        return np.random.default_rng([self.args.rollout_seed, self.epoch]).permutation(len(self.prompts))

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next `num_samples` groups, each of --n-samples-per-prompt copies of one prompt."""
        groups = [self.returned.pop(0) for _ in range(min(num_samples, len(self.returned)))]
        while len(groups) < num_samples:
            if self.offset == len(self.prompts):
                self.epoch, self.offset = self.epoch + 1, 0
                self._order = self._epoch_order()
            prompt = self.prompts[self._order[self.offset]]
            self.offset += 1
            groups.append(self._group(prompt))
        return groups

    def _group(self, prompt: Sample) -> list[Sample]:
        group = []
        for _ in range(1 if self.args.mode == "sft" else self.args.n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = self.num_groups, self.num_samples
            self.num_samples += 1
            group.append(sample)
        self.num_groups += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Hand groups back; they are served first."""
        self.returned.extend(samples)

    def state_dict(self) -> dict[str, Any]:
        """Cursor, counters and the groups handed back, as plain values."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "num_groups": self.num_groups,
            "num_samples": self.num_samples,
            "num_prompts": len(self.prompts),
            "fingerprint": self._fingerprint,
            "returned": [[sample.to_dict() for sample in group] for group in self.returned],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: the prompt data has other rows than when the state was taken.
        """
        if state["num_prompts"] != len(self.prompts):
            raise ValueError(
                f"--prompt-data {self.args.prompt_data} has {len(self.prompts)} prompts now, but had"
                f" {state['num_prompts']} when the checkpoint was saved; a resume needs the same file"
            )
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"--prompt-data {self.args.prompt_data}: its prompts are not those of when the checkpoint was saved;"
                " a resume needs the same file and the same flags of the data"
            )
        self.epoch, self.offset = state["epoch"], state["offset"]
        self.num_groups, self.num_samples = state["num_groups"], state["num_samples"]
        self.returned = [[Sample.from_dict(sample) for sample in group] for group in state["returned"]]
        self._order = self._epoch_order()


def _fingerprint(prompts: list[Sample]) -> str:
    """A hash of the prompts and labels in their order."""
    digest = hashlib.sha256()
    for sample in prompts:
        digest.update(json.dumps([sample.prompt, sample.label], default=repr).encode())
    return digest.hexdigest()[:16]
