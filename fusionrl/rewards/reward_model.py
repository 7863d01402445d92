"""Rewards that come by HTTP: from the engines of --rm-model (`--rm-type reward_model`) or a server (`remote_rm`).

The engines batch concurrent requests; here their number is bounded.
"""

import asyncio
import itertools
from argparse import Namespace
from weakref import WeakKeyDictionary

import numpy as np

from fusionrl.data.sample import Sample
from fusionrl.engines.answers import AnswerError, parse_score
from fusionrl.engines.http import auth_headers, post
from fusionrl.rewards.reward_call import LostReward

MAX_IN_FLIGHT = 64  # requests at each engine: enough to fill its batches, few enough to be answered in time
MAX_TRIES = 10
_limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
_turns = itertools.count()


async def model_score(args: Namespace, sample: Sample) -> float | LostReward:
    """The reward model's score of prompt and response; LostReward where it takes over --reward-timeout-s.

    Broken connections and 5xx answers are tried again with growing pauses. Raises ValueError if the run has no reward
    model, or it cannot read the sample; RuntimeError for a 4xx answer, or the last failed try; AnswerError if the
    answer holds no score.
    """
    urls = getattr(args, "rm_urls", None)
    if not urls:
        raise ValueError("there is no reward model; give --rm-model")
    payload = {"input_ids": await asyncio.to_thread(input_ids, args, sample)}
    limit = _limits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_IN_FLIGHT * len(urls)))
    async with limit:
        url = f"{urls[next(_turns) % len(urls)]}/classify"
        try:
            async with asyncio.timeout(args.reward_timeout_s):
                answer = await post(url, payload, max_retries=MAX_TRIES, headers=auth_headers(args.api_key))
        except TimeoutError:
            return LostReward("timeout")
    try:
        return parse_score(answer)
    except AnswerError as error:
        raise AnswerError(f"{url}: {error}") from error


def input_ids(args: Namespace, sample: Sample) -> list[int]:
    """Return what the reward model reads of a sample: its tokens, or the conversation by the reward model's template.

    Tokens of padding at the end are left out, as transformers takes the score of the last one that is none. Raises
    ValueError if there is nothing to read, for a token that the reward model has not, or for a conversation that its
    template refuses.
    """
    from fusionrl.models.engine_config import read_scorer, same_tokens  # not for `remote_rm`, whose process waits

    model = read_scorer(args.rm_model, "--rm-model")
    reads_tokens = args.rm_input == "auto" and same_tokens(args.hf_checkpoint, args.rm_model)
    if args.rm_input == "tokens" or reads_tokens:
        ids = np.asarray(sample.array("tokens")).tolist()
    else:
        ids = _conversation(args.rm_model, sample)
    while len(ids) > 1 and ids[-1] == model.pad_token_id:
        ids.pop()
    if not ids:
        raise ValueError("it has no tokens")
    if max(ids) >= model.vocab_size:  # such a token ends an SGLang server
        raise ValueError(f"token {max(ids)} is none of the {model.vocab_size} of --rm-model {args.rm_model}")
    return ids


def _conversation(folder: str, sample: Sample) -> list[int]:
    from fusionrl.data.render import render_messages
    from fusionrl.data.tokenizer import load_tokenizer

    prompt = sample.messages or sample.prompt
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    tokenizer = load_tokenizer(folder)
    try:
        conversation = [*messages, {"role": "assistant", "content": sample.response}]
        text = render_messages(tokenizer, conversation, may_lose=None).text
    except ValueError as error:
        raise ValueError(f"--rm-model {folder}: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)


async def remote_rm(args: Namespace, sample: Sample, **kwargs: object) -> object:
    """Return the answer of --rm-url to `{"prompt", "response", "label"}`: a number or a JSON object (see --reward-key).

    Broken connections and 5xx answers are tried again with growing pauses, within --reward-timeout-s. Raises
    RuntimeError for a 4xx answer, or the last failed try.
    """
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post(args.rm_url, payload, max_retries=MAX_TRIES)
