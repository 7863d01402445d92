"""The sandbox in each mode, and as each user that a test can be: root, another one, or whoever runs the tests."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from fusionrl.sandbox import SandboxResult

REPO = Path(__file__).parents[2]
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
# (namespaces, other user): the second only where root can become somebody else
CONFIGURATIONS = [
    pytest.param((namespaces, other), id=f"{'namespaces' if namespaces else 'weak'}-{'nobody' if other else 'self'}")
    for namespaces in (True, False)
    for other in ([False, True] if IS_ROOT else [False])
]
# Each mode and each user once, for what does not depend on both.
each_mode = pytest.mark.parametrize("run", [CONFIGURATIONS[0], CONFIGURATIONS[-1]], indirect=True)
each_mode_crossed = pytest.mark.parametrize("run", CONFIGURATIONS[1:-1] or CONFIGURATIONS, indirect=True)


@cache
def readable_python() -> str | None:
    """An interpreter that every user can start: this one, or the system's; None: there is none."""
    for python in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        check = "import sys; sys.exit(sys.version_info < (3, 11))"
        if python is None:
            continue
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if IS_ROOT else {}
        try:
            if subprocess.run([python, "-c", check], cwd="/", check=False, **user).returncode == 0:
                return python
        except OSError:
            continue
    return None


def alive(mark: str) -> list[int]:
    """Processes on this machine whose command line has `mark`."""
    processes = psutil.process_iter(["cmdline"])
    return [p.pid for p in processes if any(mark in part for part in p.info["cmdline"] or [])]


class Sandbox:
    """Programs in one mode, as one user."""

    def __init__(self, namespaces: bool, other_user: bool) -> None:
        self.namespaces, self.uid = namespaces, NOBODY if other_user else os.geteuid()
        needs_readable = other_user or (IS_ROOT and not namespaces)
        python = readable_python() if needs_readable else sys.executable
        if python is None:
            pytest.skip("no interpreter that every user can read")
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if other_user else {}
        self.python = python
        self._driver = subprocess.Popen(
            [python, str(Path(__file__).with_name("driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"},
            **user,
        )
        first = self.ask("")
        if "error" in first:
            self.close()
            pytest.skip(f"this machine does not give this mode: {first['error']}")

    def ask(self, code: str, stdin: str = "", **limits: Any) -> dict[str, Any]:
        """The fields of the result, or {"error": …}."""
        assert self._driver.stdin and self._driver.stdout
        request = {"code": code, "stdin": stdin, "limits": {"namespaces": self.namespaces, **limits}}
        self._driver.stdin.write(json.dumps(request) + "\n")
        self._driver.stdin.flush()
        answer: dict[str, Any] = json.loads(self._driver.stdout.readline())
        return answer

    def __call__(self, code: str, stdin: str = "", **limits: Any) -> SandboxResult:
        """Run `code` to its end."""
        answer = self.ask(code, stdin, **limits)
        assert "error" not in answer, answer
        return SandboxResult(**answer | {"answer": answer["answer"].encode()})

    def close(self) -> None:
        """End the driver."""
        assert self._driver.stdin and self._driver.stdout
        self._driver.stdin.close()
        self._driver.wait(60)
        self._driver.stdout.close()
