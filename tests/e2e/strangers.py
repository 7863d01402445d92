"""What a process without a key gets from a listening socket; and who listens, from /proc."""

import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 6.0
GRPC_METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
_UNIMPLEMENTED, _UNAUTHENTICATED = b"12", b"16"


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket and who has it."""

    address: str
    port: int
    pid: int
    command: str


def listeners(pids: set[int]) -> list[Listener]:
    """Every TCP socket on which one of the processes listens."""
    owners: dict[str, int] = {}
    for pid in pids:
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(link)
                if target.startswith("socket:["):
                    owners.setdefault(target[8:-1], pid)
        except OSError:
            continue  # it ended meanwhile
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or fields[9] not in owners:
                continue
            address, port = fields[1].split(":")
            words = b"".join(struct.pack("<I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
            pid = owners[fields[9]]
            found.append(Listener(socket.inet_ntop(family, words), int(port, 16), pid, command_of(pid)))
    return found


def command_of(pid: int) -> str:
    """The command line of a process, or the title that it gave itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def _exchange(listener: Listener, data: bytes, until: tuple[bytes, ...] = ()) -> bytes | None:
    """What is answered to `data`, up to one of `until`. None: the connection was closed without an answer."""
    host = listener.address.removeprefix("::ffff:")
    answer = b""
    with socket.create_connection((host, listener.port), timeout=TIMEOUT_S) as connection:
        try:
            connection.sendall(data)
            while not any(end in answer for end in until) or not answer:
                part = connection.recv(65536)
                if not part:
                    return answer or None
                answer += part
        except TimeoutError:
            pass
        except ConnectionError:
            return answer or None
    return answer


def http_status(listener: Listener, path: str, method: str = "GET") -> str | None:
    """The status of a request without a key, "401"; None where this is no HTTP server."""
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    answer = _exchange(listener, request.encode(), (b"\r\n\r\n",)) or b""
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1") else None


def grpc_status(listener: Listener, method: str) -> bytes | None:
    """The gRPC status of an empty call without a token; None where this is no gRPC server. HTTP/2 by hand."""

    def literal(name: bytes, value: bytes) -> bytes:
        assert len(value) < 127
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload

    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    headers = b"".join(literal(name.encode(), value.encode()) for name, value in fields.items())
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers)
    answer = _exchange(listener, data + frame(0, 1, 1, b"\0\0\0\0\0"), (b"grpc-status",)) or b""
    if b"grpc-status" not in answer:
        return None
    start = answer.index(b"grpc-status") + len(b"grpc-status")
    return answer[start + 1 : start + 1 + answer[start]]


def answers_as_a_store(listener: Listener) -> bool:
    """Whether it is a TCPStore that would take keys from us: it answers torch's ping."""
    validate, ping, nonce = b"\x00" + struct.pack("=I", 0x3C85F7CE), b"\x0d", struct.pack("=I", 0x5EED5EED)
    return nonce in (_exchange(listener, validate + ping + nonce, (nonce,)) or b"")


def what_a_stranger_gets(listener: Listener) -> str:
    """In words, as the table of docs/guides/security.md has it."""
    paths = {"/metrics": "GET", "/model_info": "GET", "/workers": "GET"}
    paths |= {"/generate": "POST", "/get_or_create_runtime_env": "POST"}
    with ThreadPoolExecutor() as pool:  # all at once: a silent listener takes the whole timeout for each question
        is_store = pool.submit(answers_as_a_store, listener)
        asked_http = {path: pool.submit(http_status, listener, path, method) for path, method in paths.items()}
        asked_grpc = [pool.submit(grpc_status, listener, method) for method in GRPC_METHODS]
    if is_store.result():
        return "a TCPStore: reads and writes"
    if (status := asked_http["/metrics"].result()) is not None:
        statuses = {asked.result() for asked in asked_http.values()}
        if "200" not in statuses:
            return "HTTP: 401" if "401" in statuses else f"HTTP: {sorted(map(str, statuses))}"
        is_metrics = status == "200" and statuses <= {"200", "404", "405"}
        return "HTTP: numbers (/metrics)" if is_metrics else f"HTTP: {sorted(map(str, statuses))}"
    found = {asked.result() for asked in asked_grpc} - {_UNIMPLEMENTED}
    if found == {_UNAUTHENTICATED}:
        return "gRPC: InvalidAuthToken"
    if found != {None}:
        return f"gRPC: {sorted(map(str, found))}"
    return "no answer"
