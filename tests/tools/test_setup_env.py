"""setup-env.sh: clear errors, and nothing done for mistakes. (Its installing is tested by every CI run.)"""

import hashlib
import http.server
import os
import re
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from scripts.uv_arguments import arguments, read_settings

ROOT = Path(__file__).resolve().parents[2]
# No index and no other source: pip fails at the first package, after .venv was made.
NOTHING = {"FUSIONRL_ENV": "cpu", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the pip of this one: another takes seconds."""
    folder = tmp_path_factory.mktemp("env") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")
    return folder


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts/setup-env.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.mark.parametrize("message", ["exmaples", "FUSIONRL_ENV=tpu", "PYTHON=/no/such/python"])
def test_mistakes_are_named(tmp_path: Path, message: str) -> None:
    name, _, value = message.partition("=")
    arguments, wrong = ([], {name: value}) if value else ([name], {})
    done = run(*arguments, **({"FUSIONRL_ENV": "cpu", "FUSIONRL_VENV": str(tmp_path / "venv")} | wrong))
    assert done.returncode == 1 and message in done.stderr and not (tmp_path / "venv").exists()


def fingerprint(python: Path, kind: str, names: tuple[str, ...]) -> str:
    """What a stamp must read: the set, the interpreter, the checkout and every file that decides the packages."""
    version = subprocess.run([python, "-VV"], capture_output=True, text=True, check=True).stdout.strip()
    content = f"{kind} {version} {ROOT}\n".encode()
    content += b"".join((ROOT / name).read_bytes() for name in (*names, "setup.py"))
    return hashlib.sha256(content).hexdigest() + "\n"


def test_an_install_is_tried_when_the_stamp_does_not_fit(venv: Path, tmp_path: Path) -> None:
    names = tuple(f"requirements/{name}.txt" for name in ("cpu", "cpu-nodeps", "dev"))
    stamp = venv / ".stamp-base"
    stamp.write_text(fingerprint(venv / "bin/python", "cpu", names))
    environment = NOTHING | {"FUSIONRL_VENV": str(venv), "PYTHON": ""}
    done = run(**environment)
    assert (done.returncode, done.stderr) == (0, "") and "up to date" in done.stdout
    assert not (venv / "install.log").exists()
    stamp.write_text("of other files\n")
    done = run(**environment, PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 1 and not list(venv.glob(".stamp*"))
    assert "No matching distribution" in done.stderr and "install.log" in done.stderr, "the end of pip's log"


def test_what_is_compiled_does_not_go_by_where_the_checkout_is(tmp_path: Path) -> None:
    """A folder of packages within one named test, with what is left out and what is not."""
    packages = tmp_path / "test" / "pip" / ".venv" / "lib" / "site-packages"
    files = {"torch/a.py": True, "torch/b/contest/c.py": True, "torch/b/test/d.py": False, "pip/e.py": False}
    files |= {"transformers/models/auto/f.py": True, "transformers/models/bert/g.py": False, "my_pip/h.py": True}
    for name in files:
        (packages / name).parent.mkdir(parents=True)
        (packages / name).write_text("pass\n")
    (pattern,) = re.findall(r"^left_out='([^']+)'", (ROOT / "scripts" / "setup-env.sh").read_text(), re.MULTILINE)
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-x", pattern, str(packages)], check=True)
    compiled = {name: (packages / name).parent.joinpath("__pycache__").exists() for name in files}
    assert compiled == files


def test_a_torch_index_that_does_not_answer(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was named is a mistake; PyTorch's own is passed over, and the line says what comes then."""
    nowhere = "http://127.0.0.1:9"
    flags = NOTHING | {"PIP_FIND_LINKS": str(tmp_path), "FUSIONRL_VENV": str(venv)}
    done = run(**flags, FUSIONRL_TORCH_INDEX=f"{nowhere}/whl/cpu")
    assert done.returncode == 1 and f"FUSIONRL_TORCH_INDEX={nowhere}/whl/cpu does not answer" in done.stderr
    monkeypatch.delenv("FUSIONRL_TORCH_INDEX", raising=False)
    done = run(**flags, https_proxy=nowhere, HTTPS_PROXY=nowhere, no_proxy="", NO_PROXY="")
    assert done.returncode == 1 and "whl/cpu does not answer: torch comes from where pip looks" in done.stdout
    assert "CUDA build (5.7 GB)" in done.stdout and "No matching distribution" in done.stderr


def test_the_cpu_build_is_looked_for_in_its_index_first(venv: Path, tmp_path: Path) -> None:
    class Index(http.server.BaseHTTPRequestHandler):
        asked: ClassVar[list[str]] = []

        def do_GET(self) -> None:
            self.asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html><body></body></html>")

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        index = f"http://127.0.0.1:{server.server_port}"
        url = f"{index}/whl/cpu"
        flags = NOTHING | {"PIP_NO_INDEX": "0", "PIP_RETRIES": "0", "PIP_FIND_LINKS": str(tmp_path)}
        flags |= {"PIP_INDEX_URL": f"{index}/simple", "FUSIONRL_TORCH_INDEX": url, "FUSIONRL_VENV": str(venv)}
        done = run(**flags)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 1  # the index has nothing
    assert any(path.startswith("/whl/cpu/torch/") for path in Index.asked)
    log = (venv / "install.log").read_text()
    assert f"pip install --extra-index-url {url} -r requirements/cpu.txt" in log


def test_uv_looks_where_pip_looks() -> None:
    """Later sections count more; lists keep their order; what concerns another command is left."""
    listing = """global.index-url='https://one/simple'
global.extra-index-url='https://two/simple\\nfile:///three'
download.index-url='https://other/simple'
install.find-links='/wheels'
:env:.index-url='https://four/simple'
:env:.cert='/etc/certificates.pem'"""
    assert arguments(read_settings(listing)) == [
        *("--index-url", "https://four/simple"),
        *("--extra-index-url", "https://two/simple", "--extra-index-url", "file:///three"),
        *("--find-links", "/wheels", "SSL_CERT_FILE=/etc/certificates.pem"),
    ]
    assert arguments(read_settings(":env:.no-index='1'\n")) == ["--no-index"]
