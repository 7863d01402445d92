"""A network that drops everything without a word: a connection breaks after a time, and the request goes elsewhere."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.engines.silent_network import SILENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not shutil.which("ip"), reason="there is no `ip`")]
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.parametrize("case", ["client", "router", "call"])
def test_requests_do_not_wait_for_a_machine_that_is_gone(case: str) -> None:
    """Of a client's own connection, of the router's to an engine, and of the driver's to an engine of its user. Without
    a time limit they wait for an hour."""
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no namespaces")
    command = [*NAMESPACES, sys.executable, "-m", "tests.engines.silent_network", case]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["seconds"] < (60 if case == "router" else 4 * SILENCE_S)
    if case != "router":
        assert all("did not answer" in said and "timed out" in said.lower() for said in found["said"]), found
    else:
        assert found["said"] == ["answered"] * 2
