"""The model and the prompts of tools/pipeline_matrix.py: random weights that answer at all lengths and call a tool.

A random model ends its answer at each token with the same small chance, so answers are of all lengths and some lie over
pushes. One token of its vocabulary is a whole tool call: it is sampled as often as any other, so about half of the
turns that end call the tool.
"""

import json
from pathlib import Path

from tools.make_quickstart import build_model, build_tokenizer, write_jsonl
from tools.pipeline_hooks import TOOL

CALL = "<tool_call>\n" + json.dumps({"name": TOOL, "arguments": {}}) + "\n</tool_call>"
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_task(folder: Path, seed: int = 0) -> None:
    """Write model/ and train.jsonl."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>", CALL]})
    tokenizer.chat_template = CHAT_TEMPLATE
    build_model(tokenizer, seed).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = ({"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10, 40) for b in range(10, 40))
    write_jsonl(folder / "train.jsonl", rows)
