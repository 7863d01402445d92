"""The reward of the proof's runs: an untrained model, too, gets different ones."""

from typing import Any


async def partial_credit(args: Any, sample: Any, **kwargs: Any) -> float:
    """Reward the right answer with 1, others with up to 0.5 for the share of digits."""
    if sample.response.strip() == sample.label:
        return 1.0
    return 0.5 * sum(character.isdigit() for character in sample.response) / max(1, len(sample.response))
