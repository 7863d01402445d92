"""Two agents in one model: a solver, a critic of its solution, and the solver again, as three samples of one prompt.

    --custom-generate-function-path plugins.agents.solver_critic.generate --apply-chat-template --rm-type math_verify

All three get the reward of the final solution, so that the critic is paid for what its critique brings about. They
share one group and its baseline.
"""

import copy
from typing import Any

from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import render_prompt
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rewards import async_rm
from fusionrl.rollout.sglang_rollout import generate as generate_one

CRITIC = "Check this solution: name its mistakes, or say that there are none."
REVISE = "Give your final solution."


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """[first solution, critique, final solution]; fewer where one of them was cut short by an abort."""
    if sample.messages is None:
        raise ValueError("plugins.agents.solver_critic speaks by the chat template: add --apply-chat-template")
    messages, samples = list(sample.messages), []
    for instruction in (None, CRITIC, REVISE):
        if instruction is not None:
            reply = {"role": "assistant", "content": samples[-1].response}
            messages = [*messages, reply, {"role": "user", "content": instruction}]
        generated = await generate_one(args, _with_prompt(args, sample, messages), sampling_params)
        samples.append(generated)
        if generated.status == generated.Status.ABORTED:
            return samples
    reward = await async_rm(args, samples[-1])
    for generated in samples:
        generated.reward = reward
    return samples


def _with_prompt(args: Any, sample: Any, messages: list[dict[str, Any]]) -> Any:
    """A copy of the sample with another prompt."""
    prompted = copy.deepcopy(sample)
    columns = PromptColumns("", apply_chat_template=True, chat_template_kwargs=args.apply_chat_template_kwargs)
    prompted.messages = messages
    tokenizer, tools = load_tokenizer(args.hf_checkpoint), sample.metadata.get("tools")
    prompted.prompt = render_prompt(messages, tokenizer, columns, tools).text
    prompted.prompt_tokens = None
    return prompted
