"""Names and ways between processes: host name, interfaces, proxies."""

import os
import socket
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from fusionrl.base.environment import hide_passwords
from fusionrl.base.network_interfaces import GLOO, NCCL
from fusionrl.checks.doctor.findings import Finding, fact, fault, warning

_CONNECT_S = 3.0
_LOCAL = "127.0.0.1"


def network_findings(environ: Mapping[str, str] = os.environ, host: str | None = None) -> list[Finding]:
    """Check this machine's name, the interfaces that variables name, and proxies. `host`: None means its own name."""
    return [*_name_findings(host or socket.gethostname()), *_interface_findings(environ), *_proxy_findings(environ)]


def _name_findings(host: str) -> list[Finding]:
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        cure = f"add a line '127.0.0.1 {host}' to /etc/hosts, or set the host name to one that resolves"
        return [fault("host", f"the host name {host} does not resolve ({error}); torch and Ray look it up", cure)]
    try:
        with socket.create_server((_LOCAL, 0)) as server, socket.create_connection(server.getsockname(), _CONNECT_S):
            pass
    except OSError as error:
        cure = "bring the interface lo up (ip link set lo up), and let the firewall pass 127.0.0.1"
        return [fault("host", f"no connection over {_LOCAL}: {error}", cure)]
    return [fact("host", f"{host} is {address}")]


def _interface_findings(environ: Mapping[str, str]) -> list[Finding]:
    import psutil

    there = sorted(psutil.net_if_addrs())
    findings = []
    for variable in (GLOO, NCCL):
        value = environ.get(variable)
        if not value or value.startswith("^"):  # NCCL: all but these
            continue
        names = value.removeprefix("=").split(",")
        is_prefix = variable == NCCL and not value.startswith("=")
        missing = [n for n in names if not any(t == n or (is_prefix and t.startswith(n)) for t in there)]
        if missing:
            cure = f"unset {variable}, as fusionrl chooses an interface itself, or name one of {', '.join(there)}"
            text = f"{variable}={value}: this machine has no interface {', '.join(missing)}"
            findings.append(fault("interface", text, cure))
    return findings


def _proxy_findings(environ: Mapping[str, str]) -> list[Finding]:
    variables = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)]
    if not variables:
        return []
    proxies = {"no": environ.get("no_proxy") or environ.get("NO_PROXY") or ""}
    if urllib.request.proxy_bypass_environment(_LOCAL, proxies):  # type: ignore[attr-defined]  # typeshed lacks it
        return []
    cure = "export no_proxy=127.0.0.1,localhost, with the addresses of all nodes"
    return [warning("proxy", f"{variables[0]} is set, and no_proxy does not name {_LOCAL}, where engines are", cure)]


def address_findings(check: str, flag: str, address: str) -> list[Finding]:
    """Connect to a server that a flag names, as host:port or as a URL."""
    displayed = f"{flag} {hide_passwords(address)}"
    try:
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        cure = "write host:port or http://host:port/path, with a port of 1 to 65535"
        return [fault(check, f"{displayed}: no address ({error})", cure)]
    try:
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except OSError as error:
        cure = "start the server, or correct the address; a firewall between the machines may drop it, too"
        return [fault(check, f"{displayed}: no connection ({error})", cure)]
    return [fact(check, f"{displayed} answers")]
