"""`fusionrl view --serve`: newest state at each reload, samples on demand, and nothing for strangers."""

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.observe.view.page import Pages, serve_pages
from tests.observe.browser import Browser
from tests.observe.view_runs import sample, unpack, write_run, write_tokenizer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [[sample(i) for i in range(4)]], write_tokenizer(tmp_path / "model"))


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    server, found = serve_pages(Pages([run]))
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def get(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_samples_on_demand(run: Path, address: str) -> None:
    status, page = get(address)
    assert status == 200 and "connect-src 'self'" in page and "answer 2" not in page and "run0-1-train" not in page
    status, text = get(address + "block/run0-1-train-a1")
    block, more = map(unpack, text.split("\n"))
    assert status == 200 and block["rows"]["2"]["response"] == "answer 2"
    assert more["facts"]["samples"] == 4 and set(more["vocabulary"]) >= set(map(str, block["rows"]["2"]["tokens"]))


def test_nothing_for_strangers(run: Path, address: str) -> None:
    base, secret = address.rstrip("/").rsplit("/", 1)
    assert len(secret) >= 20
    within = [
        f"/{secret}{end}" for end in ("", "/../", "/block/../../metrics.jsonl", "/block/metrics.jsonl", "/block/")
    ]
    for path in ("", "/", "/wrong/", *within):
        assert get(base + path)[0] == 404, path
    assert get(address, Host="evil.example:80")[0] == 404, "a name that a foreign page lets point here"
    assert get(address, Host="localhost:80")[0] == get(address, Host="localhost")[0] == 200, "a browser leaves it out"


def test_what_cannot_be_read_any_more(run: Path, address: str) -> None:
    (path,) = (run / "rollouts").glob("*.jsonl")
    path.unlink()
    path.mkdir()
    status, text = get(address + "block/run0-1-train-a1")
    assert status in (404, 500) and text
    with (run / "metrics.jsonl").open("a") as file:
        file.write("broken\n" + (run / "metrics.jsonl").read_text())
    status, text = get(address)
    assert status == 500 and "is not a metrics line" in text


def test_a_browser_that_goes_away(run: Path, address: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It closes the connection before the page is sent; nothing is printed, and the next request is answered."""
    url = urlsplit(address)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", url.port)) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.sendall(f"GET {url.path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    time.sleep(0.1)
    assert get(address)[0] == 200 and "Traceback" not in capfd.readouterr().err


def test_in_a_browser(run: Path, address: str, tmp_path: Path) -> None:
    with closing(Browser(tmp_path / "chromium")) as browser:
        browser.open(address)
        browser.click("table th a")
        browser.settle()
        assert "answer 3" in browser.text() and browser.errors == []
        browser.go("#/run/0/file/0/sample/1")
        assert browser.js("document.querySelectorAll('.tokens span').length") == 4
        assert "[" not in browser.js("document.querySelector('.tokens').textContent"), "decoded"
        path = RolloutWriter(run).write(1, 1, [sample(0, response="a later answer")])
        with MetricsSink(run, 1) as sink:
            sink.log(2, {"rollout/raw_reward": 1.0})
        browser.open(address, "#/run/0/file/1")
        assert "a later answer" in browser.text()
        path.unlink()
        browser.open(address)
        browser.go("#/run/0/file/0")
        assert browser.errors == [] and all(url.startswith(address) for url in browser.requests)


def test_the_command_serves_until_it_is_stopped(run: Path) -> None:
    command = [sys.executable, "-m", "fusionrl.cli", "view", str(run), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        try:
            assert get(served.stdout.readline().strip())[0] == 200
            served.send_signal(signal.SIGINT)
            assert served.wait(20) == 0 and served.stderr.read() == ""
        finally:
            served.kill()
