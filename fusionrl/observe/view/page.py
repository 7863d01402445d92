"""The HTML file: style, packed data and scripts in one, and a policy that lets it load nothing and run nothing else.

`Pages` serves it from this machine: newest state at each reload, and samples read when they are looked at. Only this
machine can connect, and only who has the address: its path has a random part.
"""

import base64
import functools
import hashlib
import html
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fusionrl.observe.rollouts import RolloutFile, list_rollouts
from fusionrl.observe.show import Samples, reward_key
from fusionrl.observe.view.run_block import RunBlock, metrics_of, vocabulary_of
from fusionrl.observe.view.step_block import build_block, pack

Answer = tuple[int, str, bytes]  # status, content type, body
_THIS_MACHINE = ("127.0.0.1", "localhost")


def make_server(host: str, port: int, answer: Callable[[str], Answer]) -> ThreadingHTTPServer:
    """Return a server that is bound and not yet serving. `answer` takes the path of a GET, "" for a foreign request.

    At an address of this machine, a request that names another host is foreign: a page elsewhere may let a name of its
    own point here. The port is not looked at: a tunnel has another one, and a browser leaves out port 80.
    """

    class Handler(BaseHTTPRequestHandler):
        server_version = "fusionrl"

        def do_GET(self) -> None:
            """Send what `answer` returns, or a 500 with the error's text."""
            is_named = (self.headers.get("Host") or "").partition(":")[0] in _THIS_MACHINE
            try:
                status, kind, body = answer(self.path if is_named or host not in _THIS_MACHINE else "")
            except (ValueError, OSError, LookupError) as error:  # also of a file that was deleted or cut meanwhile
                status, kind, body = 500, "text/plain", f"{type(error).__name__}: {error}".encode("utf-8", "replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            try:
                self.end_headers()
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True  # the reader left

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: a secret address would be in it, and Prometheus asks every few seconds."""

    return ThreadingHTTPServer((host, port), Handler)


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
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:;"
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


# ------------------------------------------------------------------------------------------------ the server
_MOST_BYTES = 200_000_000  # of the samples of one step


class Pages:
    """Answers of the server: the page, and the samples of a file by its name on the page."""

    def __init__(self, runs: Sequence[Path], vocabulary: str = "") -> None:
        """Raises ValueError if the folder `vocabulary` has no tokenizer."""
        self._runs = runs
        if vocabulary:
            vocabulary_of(runs[0], vocabulary)  # a wrong folder fails here and not in the browser
        self._vocabulary_of = functools.cache(lambda run: vocabulary_of(run, vocabulary))

    def index(self) -> bytes:
        """Return the page with the metrics of now, and the names of all files; ValueError if a run cannot be read."""
        blocks = []
        for number, run in enumerate(self._runs):
            listed = [
                {"step": file.step, "kind": file.kind, "attempt": file.attempt, "block": _name(number, file)}
                for file in list_rollouts(run)
            ]
            facts, left_out = metrics_of(run)
            facts |= {"files": listed, "repeats": {}, "vocabulary": None, "left_out": left_out}
            blocks.append(RunBlock(facts, {}))
        return "".join(page_parts(blocks, is_served=True)).encode()

    def block(self, name: str) -> bytes | None:
        """The samples of a file and what the page does not know of it yet, packed; None for a name of none."""
        files = {_name(n, file): (run, file) for n, run in enumerate(self._runs) for file in list_rollouts(run)}
        if name not in files:
            return None
        run, file = files[name]
        block = build_block(Samples(file, reward_key(run, file)), _MOST_BYTES, {})
        vocabulary = self._vocabulary_of(run)
        pieces = vocabulary.pieces(block.token_ids) if vocabulary is not None else None
        return f"{block.text or pack(None)}\n{pack({'facts': block.facts, 'vocabulary': pieces})}".encode()


def _name(number: int, file: RolloutFile) -> str:
    return f"run{number}-{file.step}-{file.kind}-a{file.attempt}"


def serve_pages(pages: Pages, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """Return a server that is bound and not yet serving, and its page's address; ValueError if the port is taken."""
    root = f"/{secrets.token_urlsafe(16)}/"

    def answer(path: str) -> Answer:
        if path == root:
            return 200, "text/html", pages.index()
        block = pages.block(path.removeprefix(f"{root}block/")) if path.startswith(f"{root}block/") else None
        if block is None:
            return 404, "text/plain", b"there is nothing here; use the whole address that fusionrl view printed"
        return 200, "text/plain", block

    try:
        server = make_server("127.0.0.1", port, answer)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--serve {port}: {error}; leave the number out for a free port") from error
    return server, f"http://127.0.0.1:{server.server_address[1]}{root}"
