"""Names for authors of plug-ins: those that slime's users know, with the same meaning.

    from fusionrl.plugin_api import GenerateState, Sample, post

A rollout function, a generate function or a reward function written for slime runs with this import in place of its
own.
`args` has slime's flat names. It is a copy: a hook may set attributes on it, and nothing written there reaches the run.
"""

from typing import Any

from fusionrl.buffer.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from fusionrl.config.hooks import load_function
from fusionrl.data.sample import Sample
from fusionrl.data.supervised import MultiTurnLossMaskGenerator
from fusionrl.rewards import math_dapo_utils
from fusionrl.rewards.dispatch import async_rm, batched_async_rm
from fusionrl.rewards.math_dapo_utils import compute_score
from fusionrl.rewards.math_utils import get_deepscaler_rule_based_reward, grade_answer_verl
from fusionrl.rollout.agent import append_messages, append_text, append_tokens, begin, plain_text, run_agent
from fusionrl.rollout.engine_post import post
from fusionrl.rollout.event_loop import run
from fusionrl.rollout.generate_state import GenerateState, get_rollout_num_engines
from fusionrl.rollout.sessions import open_session
from fusionrl.rollout.sglang_rollout import (
    abort,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_turn,
    load_tokenizer,
    room,
    stream_generate,
)
from fusionrl.rollout.tools import ToolAnswer, ToolError, function_schema
from fusionrl.rollout.types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput

__all__ = [
    "DynamicFilterOutput",
    "GenerateState",
    "MultiTurnLossMaskGenerator",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "ToolAnswer",
    "ToolError",
    "abort",
    "append_messages",
    "append_text",
    "append_tokens",
    "async_rm",
    "batched_async_rm",
    "begin",
    "compute_score",
    "function_schema",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_turn",
    "get_deepscaler_rule_based_reward",
    "get_log_probs_and_entropy",
    "get_rollout_num_engines",
    "grade_answer_verl",
    "load_function",
    "load_tokenizer",
    "math_dapo_utils",
    "open_session",
    "plain_text",
    "post",
    "room",
    "run",
    "run_agent",
    "stream_generate",
]


def get_log_probs_and_entropy(*args: Any, **kwargs: Any) -> Any:
    """For a custom loss, in a trainer: see `fusionrl.trainer.loss_hooks.get_log_probs_and_entropy`."""
    from fusionrl.trainer import loss_hooks  # Megatron, which only trainers import

    return loss_hooks.get_log_probs_and_entropy(*args, **kwargs)
