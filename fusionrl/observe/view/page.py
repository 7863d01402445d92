"""The HTML file: style, packed data and scripts in one, and a policy that lets it load nothing and run nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fusionrl.observe.view.packing import pack
from fusionrl.observe.view.run_block import RunBlock

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("core.js", "dom.js", "data.js", "curves.js", "steps.js", "tokens.js", "sample.js", "app.js")
FRAME = 400_000  # bytes of the page without data: its scripts and style, with room to grow


def page_parts(runs: Sequence[RunBlock], is_served: bool = False) -> Iterator[str]:
    """Return the page, part by part. A served page may request samples from its server alone."""
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    assert "</script" not in script and "</style" not in style, "it would end its own element"
    title = " and ".join(str(run.facts["name"]) for run in runs)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}';"
        " base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if is_served else "")
    )
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<title>{html.escape(title)} – fusionrl</title>\n<style>{style}</style>\n</head>\n<body>\n"
    yield "<noscript>This page shows a run of fusionrl by a script of its own. Allow scripts to see it.</noscript>\n"
    yield '<div id="app"></div>\n'
    yield from _data({"main": pack({"runs": [run.facts for run in runs]})})
    for run in runs:
        yield from _data(run.blocks)
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def _data(blocks: Mapping[str, str]) -> Iterator[str]:
    for name, text in blocks.items():
        yield f'<script type="application/octet-stream" id="{name}">{text}</script>\n'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
