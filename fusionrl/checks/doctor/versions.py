"""Versions of Python, of packages and of fusionrl's own sources, which the nodes of a cluster must have alike."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from fusionrl.checks.doctor.findings import Finding, fact, fault

# Processes of different nodes send each other pickled objects of these, or compute together.
_PACKAGES = (
    "fusionrl",
    "torch",
    "ray",
    "megatron-core",
    "sglang",
    "sglang-router",
    "transformers",
    "transformer-engine",
)
_SOURCES = Path(__file__).parents[2]
_SHOWN = 12  # digits of a hash
CURE = "run `bash scripts/setup-env.sh` there, from the same checkout"


def installed_versions(sources: Path = _SOURCES) -> dict[str, str]:
    """Return the versions of Python and of the packages that nodes must have alike.

    That of fusionrl has a hash of its Python files, found below `sources`: two checkouts may have the same version.
    """
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["fusionrl"] = f"{versions.get('fusionrl', 'not installed')} (sources {_hash_of(sources)})"
    return versions


def _hash_of(folder: Path) -> str:
    """Return a hash of the names and contents of all Python files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_SHOWN]


def version_findings(versions: Mapping[str, Mapping[str, str]], own_node: str) -> list[Finding]:
    """Compare the versions of all nodes, by name, with those of the node `own`, where this process is."""
    if own_node not in versions:
        return []
    findings, here = [], versions[own_node]
    for name, there in versions.items():
        for package in sorted({*here, *there}):
            ours, theirs = (which.get(package, "not installed") for which in (here, there))
            if ours != theirs:
                findings.append(fault("versions", f"{package} is {ours} here and {theirs} on node {name}", CURE))
    return findings or [fact("versions", f"Python and {len(here) - 1} packages are the same on all nodes")]
