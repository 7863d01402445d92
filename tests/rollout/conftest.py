from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusionrl.base.environment import extended_environment
from fusionrl.engines.engine import EngineActor
from tests.rollout.engine import sglang_engine
from tests.tiny_model import make_byte_tokenizer

if TYPE_CHECKING:
    from tests.warm_nursery import EngineBranch

# As Qwen's: answers of tools within a user's turn, and thoughts only in the last assistant turn.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.last %}<think></think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = make_byte_tokenizer(1 << 16)
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("agent") / "model"
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def served(
    engine_branch: EngineBranch, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineActor]:
    """An SGLang server of the tiny model, for the tests of the group "served": none changes its weights."""
    engine = sglang_engine(tiny_model, tmp_path_factory.mktemp("served"), 16384)
    with extended_environment(engine_branch.variables):
        engine.start()
    yield engine
    engine.shutdown()
