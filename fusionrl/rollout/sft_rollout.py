"""Rollout of `--mode sft`: conversations of the prompt data, tokenized with their loss masks; nothing is generated."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusionrl.data.chat import conversation_to_sample
from fusionrl.data.sample import Sample, Status
from fusionrl.rollout.sglang_rollout import load_tokenizer
from fusionrl.rollout.types import RolloutFnTrainOutput


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Take the next --rollout-batch-size rows: lists of messages, or a text prompt with its response as the label."""
    groups = data_source.get_samples(args.rollout_batch_size)
    return RolloutFnTrainOutput([[to_sft_sample(args, sample) for sample in group] for group in groups])


def to_sft_sample(args: Any, sample: Sample) -> Sample:
    """One supervised sample: tokens, response length and mask.

    Raises:
        ValueError: a conversation without an assistant turn, or a text prompt without a text label.
    """
    tokenizer = load_tokenizer(args.hf_checkpoint)
    if isinstance(sample.prompt, list):
        made = conversation_to_sample(
            sample.prompt,
            tokenizer,
            template_kwargs=args.apply_chat_template_kwargs,
            tools=sample.metadata.get("tools"),
        )
    else:
        if not isinstance(sample.label, str):
            raise ValueError(
                "--mode sft: a row needs a list of messages (--input-key), or a text prompt and its response as text"
                " (--label-key)"
            )
        prompt = tokenizer.encode(sample.prompt, add_special_tokens=False)
        response = tokenizer.encode(sample.label, add_special_tokens=False) + [tokenizer.eos_token_id]
        made = Sample(
            prompt=sample.prompt,
            tokens=np.asarray(prompt + response, np.int32),
            response_length=len(response),
            loss_mask=np.ones(len(response), np.int32),
            reward=0.0,
            status=Status.COMPLETED,
        )
    made.index, made.group_index, made.metadata = sample.index, sample.group_index, sample.metadata
    return made
