"""The page from a small server of this machine: newest state at each reload, and samples read when they are looked at.

Only this machine can connect, and only who has the address: its path has a random part. A request that names another
host is refused: a foreign page may let a name of its own point here.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fusionrl.observe.local_server import names_this_machine
from fusionrl.observe.rollouts import RolloutFile, list_rollouts
from fusionrl.observe.show import Samples, reward_key
from fusionrl.observe.view.packing import pack
from fusionrl.observe.view.page import page_parts
from fusionrl.observe.view.run_block import RunBlock, metrics_of, vocabulary_of
from fusionrl.observe.view.step_block import build_block
from fusionrl.observe.view.vocabulary import Vocabulary

_MOST_BYTES = 200_000_000  # of the samples of one step


class Pages:
    """Answers of the server: the page, and the samples of a file by its name on the page.

    Raises ValueError if the folder `vocabulary` has no tokenizer.
    """

    def __init__(self, runs: Sequence[Path], vocabulary: str = "") -> None:
        self._runs = runs
        self._folder = vocabulary
        # Read a named folder now, so that a wrong one fails here and not in the browser.
        self._vocabularies: dict[Path, Vocabulary | None] = (
            dict.fromkeys(runs, vocabulary_of(runs[0], vocabulary)) if vocabulary else {}
        )
        self._lock = threading.Lock()

    def index(self) -> bytes:
        """The page with the metrics of now, and the names of all files.

        Raises:
            ValueError: a run cannot be read.
        """
        blocks = []
        for number, run in enumerate(self._runs):
            listed = [
                {"step": file.step, "kind": file.kind, "attempt": file.attempt, "block": _name(number, file)}
                for file in list_rollouts(run)
            ]
            facts, left_out = metrics_of(run)
            facts |= {"files": listed, "repeats": {}, "vocabulary": None, "left_out": left_out}
            blocks.append(RunBlock(facts, {}, 0, 0))
        return "".join(page_parts(blocks, is_served=True)).encode()

    def block(self, name: str) -> bytes | None:
        """The samples of a file and what the page does not know of it yet, packed; None for a name of none."""
        for number, run in enumerate(self._runs):
            for file in list_rollouts(run):
                if _name(number, file) == name:
                    return self._block(run, file)
        return None

    def _block(self, run: Path, file: RolloutFile) -> bytes:
        numbers: dict[str, int] = {}
        block = build_block(
            Samples(file, reward_key(run, file)),
            _MOST_BYTES,
            lambda prompt, line: numbers.setdefault(str(prompt), len(numbers)),
        )
        with self._lock:  # a tokenizer's file is read once
            if run not in self._vocabularies:
                self._vocabularies[run] = vocabulary_of(run, self._folder)
        vocabulary = self._vocabularies[run]
        more = {
            "facts": {"samples": block.num_samples, "kept": block.num_kept, **block.facts},
            "vocabulary": vocabulary.pieces(block.token_ids) if vocabulary is not None else None,
        }
        return f"{block.text or pack(None)}\n{pack(more)}".encode()


def _name(number: int, file: RolloutFile) -> str:
    return f"run{number}-{file.step}-{file.kind}-a{file.attempt}"


def make_server(pages: Pages, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server that is bound and not yet serving, and the address of its page.

    Raises:
        ValueError: the port is taken.
    """
    secret = secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        server_version = "fusionrl"

        def do_GET(self) -> None:
            answers: dict[str, Callable[[], bytes | None]] = {f"/{secret}/": pages.index}
            if self.path.startswith(prefix := f"/{secret}/block/"):
                answers[self.path] = lambda: pages.block(self.path.removeprefix(prefix))
            if not names_this_machine(self.headers.get("Host")) or self.path not in answers:
                self._answer(404, b"there is nothing here; use the whole address that fusionrl view printed")
                return
            try:
                body = answers[self.path]()
            except (ValueError, OSError, LookupError) as error:  # also of a file that was deleted or cut meanwhile
                self._answer(500, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
                return
            self._answer(404 if body is None else 200, body or b"no such file")

        def _answer(self, status: int, body: bytes) -> None:
            kind = "text/html" if body.startswith(b"<!doctype") else "text/plain"
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Referrer-Policy", "no-referrer"),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            try:
                self.end_headers()
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True  # the browser left for another page

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: the address would be in it."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--serve {port}: {error}; leave the number out for a free port") from error
    return server, f"http://127.0.0.1:{server.server_address[1]}/{secret}/"
