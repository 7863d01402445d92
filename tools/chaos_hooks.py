"""A user's functions in the runs of tools/chaos.py; what they decide follows from the prompt alone."""

from argparse import Namespace

from fusionrl.plugin_api import Sample


async def reward(args: Namespace, sample: Sample, **kwargs: object) -> float:
    """Reward digits, so that rewards of a group differ."""
    return sum(character.isdigit() for character in sample.response) / max(1, len(sample.response))


def is_refused(prompt: str) -> bool:
    """Return whether the filter drops a prompt: where its first number is a multiple of 4."""
    return int(prompt.partition("+")[0]) % 4 == 0


def keep(args: Namespace, samples: list[Sample], **kwargs: object) -> bool:
    """Drop the groups of some prompts."""
    return not is_refused(str(samples[0].prompt))
