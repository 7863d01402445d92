"""Names for authors of plug-ins: those that slime's users know, with the same meaning.

    from fusionrl.plugin_api import GenerateState, Sample, post

A rollout function, a generate function or a reward function written for slime runs with this import in place of its
own.
`args` has slime's flat names. It is a copy: a hook may set attributes on it, and nothing written there reaches the run.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from argparse import Namespace
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fusionrl.buffer.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from fusionrl.config.hooks import load_function
from fusionrl.data.chat import MultiTurnLossMaskGenerator
from fusionrl.data.sample import Sample
from fusionrl.engines.post import post as _post
from fusionrl.rewards import math_dapo_utils
from fusionrl.rewards.deepscaler import get_deepscaler_rule_based_reward
from fusionrl.rewards.dispatch import async_rm, batched_async_rm
from fusionrl.rewards.math_dapo_utils import compute_score
from fusionrl.rewards.math_utils import grade_answer_verl
from fusionrl.rollout.agent import append_text, append_tokens, begin, plain_text, run_agent
from fusionrl.rollout.sessions import open_session
from fusionrl.rollout.sglang_rollout import (
    generate,
    generate_and_rm,
    generate_rollout,
    generate_turn,
    load_tokenizer,
    room,
    sampling_params,
    stream_generate,
)
from fusionrl.rollout.tools import ToolError, function_schema
from fusionrl.rollout.types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from fusionrl.rollout.versions import note_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DynamicFilterOutput",
    "GenerateState",
    "MultiTurnLossMaskGenerator",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "ToolError",
    "append_text",
    "append_tokens",
    "async_rm",
    "batched_async_rm",
    "begin",
    "compute_score",
    "function_schema",
    "generate",
    "generate_and_rm",
    "generate_rollout",
    "generate_turn",
    "get_deepscaler_rule_based_reward",
    "get_log_probs_and_entropy",
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

T = TypeVar("T")


class GenerateState:
    """State that generate functions share: tokenizer, sampling parameters, limit of concurrent requests.

    One object for each rollout's `args`: `GenerateState(args)` gives the same one again.

    tokenizer        of --hf-checkpoint
    processor        None: there is no multimodal data yet
    semaphore        the rollout's; a new one where `args` has none (outside a rollout)
    sampling_params  SGLang's, from the flags
    """

    args: Namespace
    tokenizer: PreTrainedTokenizerBase
    processor: None
    sampling_params: dict[str, Any]
    semaphore: asyncio.Semaphore

    def __new__(cls, args: Namespace) -> GenerateState:
        state: GenerateState | None = vars(args).get("generate_state")
        if state is None:
            state = super().__new__(cls)
            state.args, state.tokenizer, state.processor = args, load_tokenizer(args.hf_checkpoint), None
            state.sampling_params = sampling_params(args)
            engines = max(1, len(getattr(args, "engine_urls", ())))
            limit = args.sglang_server_concurrency * engines
            state.semaphore = getattr(args, "semaphore", None) or asyncio.Semaphore(limit)
            args.generate_state = state
        return state

    @property
    def aborted(self) -> bool:
        """Return whether the rollout has enough samples and the remaining requests are being stopped."""
        is_stopping = getattr(self.args, "is_stopping", None)
        return bool(is_stopping is not None and is_stopping())


async def post(
    url: str, payload: Mapping[str, object], max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST `payload` as JSON and return the JSON that is answered; the run's own engines get their key by themselves.

    Broken connections and 5xx answers are tried again, with growing pauses of up to 8 s. What the policy's engines
    answer is noted, so that the samples that a generate or rollout function makes of it get their weight versions.

    Raises:
        RuntimeError: a 4xx answer, or the last failed try; with the server's text.
    """
    answer = await _post(url, payload, max_retries, headers)
    note_answer(url, answer)
    return answer


def get_log_probs_and_entropy(*args: Any, **kwargs: Any) -> Any:
    """For a custom loss, in a trainer: see `fusionrl.trainer.custom_loss.get_log_probs_and_entropy`."""
    from fusionrl.trainer import custom_loss  # Megatron, which only trainers import

    return custom_loss.get_log_probs_and_entropy(*args, **kwargs)


def run(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine on one event loop that lives as long as the process, and wait for its result.

    For rollout functions, which are synchronous; sessions that they open there stay usable in the next rollout.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="plugin-loop", daemon=True).start()
    return loop
