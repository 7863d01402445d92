"""Rollout of `--mode sft`: conversations of the prompt data, tokenized with their loss masks; nothing is generated."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np

from fusionrl.data.chat import MultiTurnLossMaskGenerator, conversation_to_sample
from fusionrl.data.sample import Sample, Status
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.types import RolloutFnTrainOutput


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Take the next --rollout-batch-size rows: lists of messages, or a text prompt with its response as the label."""
    groups = data_source.get_samples(args.rollout_batch_size)
    return RolloutFnTrainOutput([[to_sft_sample(args, sample) for sample in group] for group in groups])


@functools.cache
def _loss_masks(folder: str, kind: str, template_kwargs: str) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(load_tokenizer(folder), kind, json.loads(template_kwargs))


def to_sft_sample(args: Any, sample: Sample) -> Sample:
    """One supervised sample: tokens, response length and mask.

    Raises:
        ValueError: a conversation that nothing can be trained on or no right mask can be made of (with its number), or
            a text prompt without a text label.
    """
    if isinstance(sample.prompt, list):
        template_kwargs = json.dumps(args.apply_chat_template_kwargs, sort_keys=True)
        masks = _loss_masks(args.hf_checkpoint, args.loss_mask_type, template_kwargs)
        try:
            made = conversation_to_sample(sample.prompt, masks, sample.metadata.get("tools"))
        except ValueError as error:
            raise ValueError(f"--prompt-data: conversation {sample.index}: {error}") from error
    else:
        if not isinstance(sample.label, str):
            raise ValueError(
                "--mode sft: a row needs a list of messages (--input-key), or a text prompt and its response as text"
                " (--label-key)"
            )
        tokenizer = load_tokenizer(args.hf_checkpoint)
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
