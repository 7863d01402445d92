"""Rollout of `--mode sft`: conversations of the prompt data, tokenized with their loss masks; nothing is generated."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from dataclasses import dataclass

from fusionrl.data.render import tools_of
from fusionrl.data.sample import Sample
from fusionrl.data.supervised import SupervisedSamples
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.types import DataSource, RolloutFnTrainOutput


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Take the next --rollout-batch-size rows: lists of messages, or a text prompt with its response as the label."""
    groups, settings = data_source.get_samples(args.rollout_batch_size), SftSettings.of_args(args)
    return RolloutFnTrainOutput([[to_sft_sample(settings, sample) for sample in group] for group in groups])


@dataclass(frozen=True)
class SftSettings:
    """Settings by which a row becomes a sample.

    tokenizer        folder of the tokenizer (--hf-checkpoint)
    template_kwargs  --apply-chat-template-kwargs, as JSON
    """

    tokenizer: str
    loss_mask_type: str
    template_kwargs: str

    @classmethod
    def of_args(cls, args: Namespace) -> SftSettings:
        """Read them from a hook's `args`."""
        kwargs = json.dumps(args.apply_chat_template_kwargs, sort_keys=True)
        return cls(args.hf_checkpoint, args.loss_mask_type, kwargs)


@functools.cache
def _supervised(folder: str, kind: str, template_kwargs: str) -> SupervisedSamples:
    return SupervisedSamples(load_tokenizer(folder), kind, json.loads(template_kwargs))


def to_sft_sample(settings: SftSettings, sample: Sample) -> Sample:
    """One supervised sample: tokens, response length and mask; those that its row holds, where it does.

    Raises:
        ValueError: a conversation that nothing can be trained on or no right mask can be made of (with its number), or
            a text prompt without a text label.
    """
    if (
        sample.num_tokens and sample.array("loss_mask") is not None
    ):  # of a row with the columns `tokens` and `loss_mask`
        return sample
    make = _supervised(settings.tokenizer, settings.loss_mask_type, settings.template_kwargs).make
    try:
        tokenized = make(sample.prompt, sample.label, tools_of(sample.metadata))
    except ValueError as error:
        where = f"--prompt-data: conversation {sample.index}: " if isinstance(sample.prompt, list) else ""
        raise ValueError(f"{where}{error}") from error
    tokenized.index, tokenized.group_index, tokenized.metadata = sample.index, sample.group_index, sample.metadata
    return tokenized
