"""A sample's prompt without its answer."""

from __future__ import annotations

import copy

from fusionrl.data.sample import Sample


def prompt_of(sample: Sample) -> Sample:
    """Return a sample of the same prompt, with its row's fields and its group, and without index, answer and reward."""
    return Sample(
        group_index=sample.group_index,
        prompt=copy.deepcopy(sample.prompt),
        label=copy.deepcopy(sample.label),
        metadata=copy.deepcopy(sample.metadata),
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
        prompt_tokens=sample.prompt_tokens,
        messages=copy.deepcopy(sample.messages),
    )
