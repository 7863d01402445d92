"""What several rooms' tests share: a tiny model on disk, and files of prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import make_tiny_qwen3

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with tokenizer and chat template; read-only."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    """The tiny model's tokenizer: a byte a token. Shared: do not write on it."""
    from fusionrl.rollout.sglang_rollout import load_tokenizer

    return load_tokenizer(str(tiny_model))


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """write_rows(rows, name="data.jsonl") -> path; a row that is a str is written as it stands."""

    def write(rows: list[Any], name: str = "data.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
