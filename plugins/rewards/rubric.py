"""The score that plugins/agents/verifiers_env.py left in a sample; reward processes need no environment to read it.

--custom-rm-path plugins.rewards.rubric.reward
"""

from typing import Any


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Return the reward of the environment's rubric: the weighted sum of its functions.

    Raises:
        ValueError: the sample was not made by `generate` of plugins/agents/verifiers_env.py.
    """
    if "rubric" not in sample.metadata:
        raise ValueError(
            "the sample has no score of a rubric; plugins.rewards.rubric.reward goes with"
            " --custom-generate-function-path plugins.agents.verifiers_env.generate"
        )
    return float(sample.metadata["rubric"]["reward"])
