"""A headless Chromium for tests, asked over its DevTools protocol. Where there is none, tests of pages are skipped."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
T = TypeVar("T")


def find_chromium() -> str:
    """The path of a Chromium; skips the test where there is none."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    pytest.skip(f"there is no Chromium here (looked for {', '.join(NAMES)})")


class Browser:
    """One page of a headless Chromium.

    errors    exceptions and errors of the console since the page was opened
    requests  addresses that it asked for since then
    """

    def __init__(self, folder: Path) -> None:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio")
        places = ("--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank")
        command, nowhere = [find_chromium(), *flags, *quiet, *places], subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._number = 0
        try:
            self._run(self._connect(folder / "DevToolsActivePort"))
        except BaseException:
            self._process.kill()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def _connect(self, port_file: Path) -> None:
        end = time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < end and self._process.poll() is None, "Chromium did not start"
            await asyncio.sleep(0.02)
        port = int(port_file.read_text().split()[0])
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            target = next(one for one in await answer.json() if one["type"] == "page")
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._ask(f"{domain}.enable")

    async def _ask(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), 60)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def ask(self, method: str, **params: object) -> dict[str, Any]:
        """Call a method of the protocol."""
        return self._run(self._ask(method, **params))

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, that of its end."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, f"{expression} is not true after {seconds} s; errors: {self.errors}"
            time.sleep(0.02)
        return value

    def open(self, place: Path | str, route: str = "") -> float:
        """Open a file of `fusionrl view`, or an address, wait until it is drawn; return the seconds that it took."""
        address = place if isinstance(place, str) else place.resolve().as_uri()
        self.ask("Page.navigate", url="about:blank")
        self.errors.clear()
        self.requests.clear()
        start = time.perf_counter()
        self.ask("Page.navigate", url=address + route)
        self.wait("document.documentElement?.dataset.ready === 'yes' && document.readyState === 'complete'")
        return time.perf_counter() - start

    def go(self, route: str) -> None:
        """Go to another view of the page, and wait until it is drawn."""
        self.js(f"location.hash = {route!r}")
        self.settle()

    def settle(self) -> None:
        """Wait until the view that the address names is drawn."""
        self.wait("app.dataset.route === location.hash")

    def key(self, name: str) -> None:
        """Press and release a key."""
        key = {"key": name, "code": name, "windowsVirtualKeyCode": _CODES[name]}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **key, **({"text": "\r"} if name == "Enter" else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector: str) -> None:
        """Click on the middle of an element, as a mouse does."""
        box = self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def text(self) -> str:
        """The text that is shown."""
        return str(self.js("document.body.innerText"))

    def close(self) -> None:
        """End the browser."""
        self._run(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait(10)


_CODES = {"Enter": 13, "End": 35, "ArrowRight": 39}
