"""Print pip's settings as arguments of `uv pip`, one a line: uv reads none of pip's files and variables.

    python scripts/uv_arguments.py

uv and pip then look for packages at the same places. A certificate is printed as SSL_CERT_FILE=path: uv takes it from
the environment alone.
"""

from __future__ import annotations

import ast
import subprocess
import sys

LISTS = ("extra-index-url", "find-links")
SECTIONS = ("global", "install", ":env:")  # a later one counts more, as for `pip install`


def read_settings(listing: str) -> dict[str, str]:
    """Read what `pip config list` prints: name → value, of all that concerns `pip install`."""
    settings: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in SECTIONS and (name not in settings or SECTIONS.index(section) >= settings[name][0]):
            settings[name] = (SECTIONS.index(section), str(ast.literal_eval(value)))
    return {name: value for name, (_, value) in settings.items()}


def arguments(settings: dict[str, str]) -> list[str]:
    """Return the lines to print."""
    lines = []
    if url := settings.get("index-url"):
        lines += ["--index-url", url]
    for name in LISTS:
        for value in settings.get(name, "").split():
            lines += [f"--{name}", value]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        lines.append("--no-index")
    if certificate := settings.get("cert"):
        lines.append(f"SSL_CERT_FILE={certificate}")
    return lines


if __name__ == "__main__":
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    print("\n".join(arguments(read_settings(listing.stdout))))
