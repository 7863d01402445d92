"""Questions with a search engine, in the manner of Search-R1 (arXiv 2503.09516): tags instead of tool calls.

    SEARCH_CORPUS=wiki.jsonl fusionrl train … --custom-generate-function-path plugins.agents.search_r1.generate
    --rollout-max-context-len 4096 --max-turns 4

The model writes <search>…</search>, where its turn stops; the passages follow as <information>…</information>; it ends
with <answer>…</answer>. Works with any prompt, chat template or none. The corpus has a column `text`, and may have
`title`.
"""

import functools
import os
from typing import Any

from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.agent import append_text, begin, plain_text
from fusionrl.rollout.sglang_rollout import generate_turn
from fusionrl.rollout.tools import SearchTool


@functools.cache
def search_tool() -> SearchTool:
    """The index over the file that SEARCH_CORPUS names."""
    if "SEARCH_CORPUS" not in os.environ:
        raise ValueError("plugins.agents.search_r1 needs a corpus: set SEARCH_CORPUS to a .jsonl or .parquet file")
    return SearchTool(os.environ["SEARCH_CORPUS"])


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """COMPLETED where a turn ends without a search, TRUNCATED where searches or tokens ran out."""
    sampling_params = sampling_params | {"stop": [*sampling_params.get("stop", []), "</search>", "</answer>"]}
    begin(args, sample)
    for turn in range(args.max_turns):
        answer = await generate_turn(args, sample, sampling_params)
        if answer is None or sample.status != sample.Status.COMPLETED:
            return sample
        answered, closed, _ = answer.text.partition("</search>")  # the last token may hold more than the stop string
        _, opened, query = answered.rpartition("<search>")
        if not (opened and closed):
            return sample
        if turn + 1 < args.max_turns:
            tokenizer = load_tokenizer(args.hf_checkpoint)
            passages = plain_text(tokenizer, await search_tool()(query=query.strip()), args.max_tool_response_len)
            if not append_text(args, sample, sampling_params, f"\n<information>{passages}</information>\n"):
                return sample
    sample.status = sample.Status.TRUNCATED
    return sample
