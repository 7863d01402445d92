"""Parts of SGLang's server that a run never asks for: made when they are asked for.

* Its endpoints for other protocols (OpenAI's, Anthropic's, Ollama's) describe their messages by 150 classes of
  pydantic, each of which gets a validator: 0.3 s of a core. pydantic makes a validator when the first message comes.
* Its endpoint for speech imports the models of speech, which import those of images and of mixtures of experts: 0.3 s
  of a core, for the text of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusionrl.base.lazy_modules import imported_later

_SPEECH, _PROMPT = "sglang.srt.multimodal.processors.qwen3_asr", "DEFAULT_ASR_PROMPT"


@contextmanager
def endpoints_later() -> Iterator[None]:
    """Import SGLang's server within it."""
    from pydantic import BaseModel

    usual = BaseModel.model_config
    BaseModel.model_config = usual | {"defer_build": True}
    try:
        with imported_later(_SPEECH, constants=(_PROMPT,)):
            yield
    finally:
        BaseModel.model_config = usual
