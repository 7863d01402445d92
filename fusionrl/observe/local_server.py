"""An HTTP server for the page of `fusionrl view --serve` and for Prometheus."""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
