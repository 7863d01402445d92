"""Rollout of `--mode sft`: conversations of the prompt data, tokenized with their loss masks; nothing is generated."""

import functools
import json
from argparse import Namespace

from fusionrl.data.columns import ImageColumn
from fusionrl.data.image_store import IMAGES
from fusionrl.data.render import tools_of
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import images_of
from fusionrl.data.supervised import SupervisedSamples, with_images
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.types import DataSource, RolloutFnTrainOutput


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Take the next --rollout-batch-size rows: lists of messages, or a text prompt with its response as the label."""
    groups = data_source.get_samples(args.rollout_batch_size)
    return RolloutFnTrainOutput([[to_sft_sample(args, sample) for sample in group] for group in groups])


@functools.cache
def _supervised(folder: str, kind: str, template_kwargs: str) -> SupervisedSamples:
    return SupervisedSamples(load_tokenizer(folder), kind, json.loads(template_kwargs))


def to_sft_sample(args: Namespace, sample: Sample) -> Sample:
    """One supervised sample: tokens, response length and mask; those that its row holds, where it does.

    Raises ValueError for a conversation (with its number) that nothing can be trained on or no right mask can be made
    of, or a text prompt without a text label.
    """
    if sample.num_tokens and sample.array("loss_mask") is not None:  # columns `tokens` and `loss_mask` of its row
        return sample
    template_kwargs = json.dumps(args.apply_chat_template_kwargs, sort_keys=True)
    make = _supervised(args.hf_checkpoint, args.loss_mask_type, template_kwargs).make
    try:
        tokenized = make(sample.prompt, sample.label, tools_of(sample.metadata))
    except ValueError as error:
        where = f"--prompt-data: conversation {sample.index}: " if isinstance(sample.prompt, list) else ""
        raise ValueError(f"{where}{error}") from error
    column, images = ImageColumn.of(args, args.hf_checkpoint), images_of(sample)
    processor = IMAGES.processor if column is None else column.processor
    if processor is not None and (images or column is not None):
        try:
            tokenized = with_images(tokenized, images, processor.placeholder)
        except ValueError as error:
            raise ValueError(f"--prompt-data: conversation {sample.index}: {error}") from error
    tokenized.index, tokenized.group_index, tokenized.metadata = sample.index, sample.group_index, sample.metadata
    tokenized.adapter = sample.adapter
    return tokenized
