"""A warning for prompts that reach a chat model without its chat template."""

from __future__ import annotations

import re
from pathlib import Path

from fusionrl.config.config import Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.config.run_parts import has_own_rollout, has_own_source
from fusionrl.data.rows import read_rows
from fusionrl.data.tokenizer_files import read_tokenizer_files
from fusionrl.models.scorers import has_chat_template

# How chat templates mark turns: <|im_start|>, <|user|>, [INST], <start_of_turn>, <s>.
_MARK = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|\[/?INST\]|<(?:start|end)_of_turn>|</?s>")


def chat_warnings(config: Config) -> list[str]:
    """The warning, where the default functions would give text to a model whose tokenizer has a chat template.

    Nothing is said of a text that has marks of turns: whoever wrote it has rendered it. A user's rollout, generate or
    data source function may render prompts itself. (A list of messages without --apply-chat-template is an error.)
    """
    data, rollout, folder = config.data, config.rollout, config.model.hf_checkpoint
    has_own_functions = (
        has_own_rollout(config),
        rollout.custom_generate_function_path is not None,
        has_own_source(config),
    )
    is_silent = config.run.mode == "sft" or data.apply_chat_template or config.run.load_debug_rollout_data is not None
    if is_silent or any(has_own_functions) or folder is None or not Path(folder).is_dir():
        return []
    if not has_chat_template(folder):
        return []
    flag, prompt = _first_prompt(config)
    marks = [token for token in read_tokenizer_files(folder).special_tokens if len(token) > 1]
    if not isinstance(prompt, str) or _MARK.search(prompt) or any(mark in prompt for mark in marks):
        return []
    return [
        f"{flag}: its prompts are plain text, the tokenizer of --hf-checkpoint has a chat template, and"
        " --apply-chat-template is not given: a chat model answers such text badly and may never stop; add the flag"
        " (a base model may want the text as it is)"
    ]


def _first_prompt(config: Config) -> tuple[str, object]:
    """(the flag, the prompt of its first row); None where there is none, or none that can be read."""
    sets = [("--prompt-data", path, config.data.input_key) for path in config.data.prompt_data or []]
    if config.run.mode == "eval":
        sets = [
            (f"evaluation set {eval_set.name}", eval_set.path, eval_set.input_key)
            for eval_set in eval_sets(config.to_args())
        ]
    for flag, path, key in sets[:1]:
        try:
            for _, row in read_rows(path, flag):
                return flag, row.get(key)
        except ValueError:
            break  # data that cannot be read is an error elsewhere
    return "", None
