"""Stand-ins for what two made-up machines lack: sshd and ssh, and of Slurm srun and scontrol (`nodes.sh`).

`remote.py serve ADDRESS` runs the commands that it is sent, each by `sh -c` in an almost empty environment, as a login
by ssh does. Linked under the name ssh, srun or scontrol, the file takes the arguments of that program.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

PORT = 2222
_END = b"\0exit "


def serve(address: str) -> None:
    """Run one command for each connection; its input is what comes behind the first line."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.SOL_IP, 15, 1)  # IP_FREEBIND: the address is given after the start
    server.bind((address, PORT))
    server.listen()
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    line = b""
    while not line.endswith(b"\n"):
        line += connection.recv(1)
    sent = json.loads(line)
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": os.environ["HOME"]} | sent["environ"]
    process = subprocess.Popen(
        sent["words"], env=environ, stdin=connection, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=sent["cwd"]
    )
    assert process.stdout is not None
    while data := process.stdout.read1(65536):  # type: ignore[attr-defined]
        try:
            connection.sendall(data)
        except OSError:
            break  # the caller is gone; the process reads the end of its input
    try:
        connection.sendall(_END + str(process.wait()).encode())
    except OSError:
        process.wait()
    connection.close()


def call(host: str, words: list[str], environ: dict[str, str], *, cwd: str = "/", with_input: bool = True) -> int:
    """Run `words` on `host` (node1, node2), with this process's input and output; returns the exit status."""
    connection = socket.create_connection((f"10.77.0.{host.removeprefix('node')}", PORT))
    connection.sendall(json.dumps({"words": words, "environ": environ, "cwd": cwd}).encode() + b"\n")
    if with_input:
        threading.Thread(target=_forward, args=(connection,), daemon=True).start()
    received = b""
    while data := connection.recv(65536):
        received += data
        shown = received.partition(_END[:1])[0]  # programs print no zero byte
        sys.stdout.buffer.write(shown)
        sys.stdout.flush()
        received = received[len(shown) :]
    return int(received.removeprefix(_END) or 255)


def _forward(connection: socket.socket) -> None:
    while data := os.read(0, 65536):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def ssh(words: list[str]) -> int:
    """ssh -o OPTION HOST COMMAND: no variable of this process reaches the other."""
    assert words[:2] == ["-o", "BatchMode=yes"], words
    return call(words[2], ["sh", "-c", " ".join(words[3:])], {})


def srun(words: list[str]) -> int:
    """srun [--nodelist=NODE] [--…=…] COMMAND: on one node or on both, with the environment of this process."""
    options = []
    while words[0].startswith("-"):
        options.append(words.pop(0))
    nodes = [option.removeprefix("--nodelist=") for option in options if option.startswith("--nodelist=")]
    codes: list[int] = []

    def run(node: str) -> None:
        code = call(node, words, dict(os.environ), cwd=os.getcwd(), with_input=False)
        sys.stderr.write(f"srun: {words[0]} on {node}: exit status {code}\n")  # in one piece, between lines of others
        codes.append(code if code >= 0 else 128 - code)

    threads = [threading.Thread(target=run, args=(node,)) for node in nodes or ["node1", "node2"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(codes)


def main() -> int:
    name, words = Path(sys.argv[0]).name, sys.argv[1:]
    if name == "ssh":
        return ssh(words)
    if name == "srun":
        return srun(words)
    if name == "scontrol":
        assert words == ["show", "hostnames", "node[1-2]"], words
        print("node1\nnode2")
        return 0
    serve(words[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
