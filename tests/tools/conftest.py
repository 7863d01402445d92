"""Programs of tools/ in the process of a test: their imports take seconds."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

Command = Callable[..., tuple[Any, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """command(main, *words) -> what it ends with, an exit code or a message, and what it prints."""

    def run(main: Callable[[], Any], *words: object) -> tuple[Any, str]:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # packages that other tests stand in for
        monkeypatch.setattr(sys, "argv", ["", *map(str, words)])
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        return code, "".join(capsys.readouterr())

    return run
