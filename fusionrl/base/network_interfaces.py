"""The network interface that collectives take, from the address by which a node is reached.

Only the node itself can tell which of its interfaces has an address: a process asks for its own, when it starts.
"""

from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interface_of(host: str) -> str | None:
    """Name of the local network interface that has the address `host` ("lo" for 127.0.0.1); None if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == host for address in addresses):
            return name
    return None


def collective_interfaces(host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which gloo and NCCL take the interface of `host`, an address of this node.

    On loopback nothing may leave the machine: gloo takes it whatever the user's value, and NCCL finds its way. On a
    network what the node's environment says stays. Empty where no interface has the address (a node behind another
    address than its own): the libraries then choose.
    """
    interface = interface_of(host)
    if interface is None:
        return {}
    if host.startswith("127.") or host == "::1":
        return {GLOO: interface}
    # "=" asks NCCL for this name, and not for all that begin with it (eth1, eth10).
    values = {GLOO: interface, NCCL: f"={interface}"}
    return {name: value for name, value in values.items() if not environ.get(name)}
