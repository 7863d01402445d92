"""The starters of several nodes: real Ray on two made-up machines in network and process namespaces (`nodes.sh`)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO, HERE = Path(__file__).parents[2], Path(__file__).parent
STARTERS = REPO / "scripts" / "cluster"
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--mount", "--fork", "--mount-proc"]
# Counts the nodes, and looks for the token on the command lines of its node. A line is written in one piece, as Ray and
# the stand-in of srun write to the same file.
COMMAND = """
import glob, os, signal, sys, time, ray
def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
tell("nodes:", sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
lines = [open(file, "rb").read() for file in glob.glob("/proc/[0-9]*/cmdline")]
tell("shown:", os.environ["RAY_AUTH_TOKEN"].encode() in b" ".join(lines), "mode:", os.environ["RAY_AUTH_MODE"])
@ray.remote(resources={"part": 1}, num_cpus=0)
def forwarded():
    return os.environ.get("NCCL_SOCKET_IFNAME"), os.nice(0)
tell("forwarded:", ray.get([forwarded.remote() for _ in range(2)]))
ray.shutdown()
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (tell("told"), os._exit(9)))
    tell("waiting")
    time.sleep(120)
sys.exit(7)
"""


def _can_make_namespaces() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "pgrep"))):
        return False
    made = subprocess.run(
        [*NAMESPACES, "ip", "link", "add", "node1", "type", "veth", "peer", "name", "node2"], check=False
    )
    return made.returncode == 0


def on_two_nodes(tmp_path: Path, words: list[str], *, tools: tuple[str, ...], **variables: str) -> tuple[int, str]:
    """Exit status and output of `words` on node1, where `tools` are the stand-ins of remote.py.

    There are two nodes, the token is on no command line, variables are forwarded, and no Ray is left.
    """
    if not _can_make_namespaces():
        pytest.skip("this machine grants no network namespaces")
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for name in tools:
        (fakes / name).write_text(f"#!{sys.executable} -B\n" + (HERE / "remote.py").read_text(encoding="utf-8"))
        (fakes / name).chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    environ |= {"PATH": f"{fakes}:{environ['PATH']}", "FUSIONRL_VENV": str(Path(sys.executable).parents[1])} | variables
    command = [*NAMESPACES, "bash", str(HERE / "nodes.sh"), sys.executable, *words]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environ, cwd=REPO, timeout=300, check=False, **outputs)
    lines = (
        "nodes: ['10.77.0.1', '10.77.0.2']",
        "shown: False mode: token",
        "forwarded: [('fabric0', 0), ('fabric0', 0)]",
        "left on node2: 0",
    )
    assert all(line in done.stdout for line in lines), done.stdout
    return done.returncode, done.stdout


def test_the_starters_are_valid_bash() -> None:
    for script in [*STARTERS.glob("*.sh"), *(REPO / "scripts" / "models").glob("*.sh"), HERE / "nodes.sh"]:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_a_starter_says_what_it_lacks(tmp_path: Path) -> None:
    for words, part in {
        ("ssh.sh", "node2"): "then -- and the command",
        ("ssh.sh", "node2", "--"): "no command",
        ("slurm.sh",): "give the command",
    }.items():
        command = ["bash", STARTERS / words[0], *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and part in done.stderr


@pytest.mark.e2e
def test_ssh(tmp_path: Path) -> None:
    words = ["bash", str(STARTERS / "ssh.sh"), "node2", "--", "python", "-c", COMMAND]
    code, output = on_two_nodes(
        tmp_path,
        words,
        tools=("ssh",),
        RAY_START_FLAGS='--num-cpus=1 --resources={"part":1}',
        FORWARD="NCCL_SOCKET_IFNAME",
        NCCL_SOCKET_IFNAME="fabric0",
    )
    assert code == 7, output


@pytest.mark.e2e
def test_slurm(tmp_path: Path) -> None:
    """The script's own steps with Ray's symmetric run; a signal before the end of the job reaches the command alone."""
    told = (
        'bash "$@" > told.log 2>&1 & job=$!;until grep -qx waiting told.log; do sleep 1; kill -0 $job || break; done;'
    )
    told += " kill -USR1 $job; wait $job; code=$?; "
    told += "kill -0 $job 2>/dev/null && { wait $job; code=$?; }; cat told.log; exit $code"
    words = ["bash", "-c", told, "batch", str(STARTERS / "slurm.sh"), "python", "-c", COMMAND, "wait"]
    code, output = on_two_nodes(
        tmp_path,
        ["env", f"--chdir={tmp_path}", *words],
        tools=("srun", "scontrol"),
        RAY_START_FLAGS='--num-cpus=1 --resources={"part":1}',
        NCCL_SOCKET_IFNAME="fabric0",
        RAY_gcs_rpc_server_reconnect_timeout_s="3",  # else the other node looks for the head for a minute
        SLURM_JOB_ID="12345",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_SUBMIT_DIR=str(tmp_path),
    )
    assert code == 9 and "told" in output.splitlines(), output
    assert not list(tmp_path.glob(".slurm-*")), "the file with the command's process stays behind"
