"""Checks of the installed packages: their versions, imports, and agreement between nodes."""

import contextlib
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from fusionrl.base.environment import child_environment
from fusionrl.checks.doctor.findings import Finding, fact, fault, warning

_OPTIONAL = frozenset({"matplotlib", "sglang", "sglang-router", "nvidia-ml-py", "transformer-engine"})
_EXTRA = "gpu"  # names the engines' packages, which a CPU has, too
_MODULES = ("torch", "ray", "transformers", "megatron.core", "sglang", "sglang_router")
_IMPORT_LIMIT_S = 180.0
# One process a module: a broken library may end its process.
_IMPORT = """
import importlib, sys
from fusionrl.base import cpu_wing
cpu_wing.install_stand_ins()
importlib.import_module(sys.argv[1])
"""
_TORCH = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available()]))"


def package_findings(needs_engines: bool = True, requirements: Iterable[str] | None = None) -> list[Finding]:
    """Compare what is installed with `requirements`; None: those that fusionrl's own package names."""
    from packaging.requirements import Requirement

    try:
        named = list(metadata.requires("fusionrl") or []) if requirements is None else list(requirements)
    except metadata.PackageNotFoundError:
        cure = "install fusionrl (pip install -e .) into the environment that runs it"
        return [warning("packages", "fusionrl is not an installed package, so its requirements are not known", cure)]
    findings: list[Finding] = []
    versions = [f"python {platform.python_version()}"]
    for text in named:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", _EXTRA)):
            continue
        name = requirement.name
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            is_needed = name not in _OPTIONAL or (needs_engines and name.startswith("sglang"))
            if is_needed:
                cure = f"pip install '{name}{requirement.specifier}'"
                findings.append(fault("packages", f"{name} is not installed", cure))
            continue
        versions.append(f"{name} {version}")
        if requirement.specifier and not requirement.specifier.contains(version, prereleases=True):
            cure = f"install a version that was tested: pip install '{name}{requirement.specifier}'"
            findings.append(fault("packages", f"{name} is {version}, outside of {requirement.specifier}", cure))
    return findings or [fact("packages", ", ".join(versions))]


def torch_findings(device: str) -> list[Finding]:
    """Import torch in a process of its own: a broken build shows itself there. `device`: "cpu" or "cuda"."""
    ran = _python(_TORCH)
    if ran.returncode:
        text = f"it cannot be imported: {_last_line(ran.stderr)}"
        return [fault("torch", text, "install torch again: pip install torch")]
    version, cuda, has_cuda = json.loads(ran.stdout.splitlines()[-1])
    if device == "cuda" and not has_cuda:
        built = f"is built for CUDA {cuda}" if cuda else "is built without CUDA"
        cure = "install the build of torch for the driver's CUDA version (nvidia-smi), or use --device cpu"
        return [fault("torch", f"torch {version} {built} and finds no GPU, though the machine has one", cure)]
    return [fact("torch", f"torch {version}" + (f", CUDA {cuda}" if cuda else ", a CPU build"))]


def import_findings(modules: Iterable[str] = _MODULES) -> list[Finding]:
    """Import each module in a process of its own."""
    findings = []
    for module in modules:
        ran = _python(_IMPORT, module)
        if ran.returncode:
            cure = f"install {module.split('.')[0]} again, with the versions of requirements/"
            findings.append(fault("imports", f"{module} cannot be imported: {_last_line(ran.stderr)}", cure))
    return findings or [fact("imports", f"{', '.join(modules)} can be imported")]


def _python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *argv]
    try:
        env = child_environment("doctor")
        return subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False, env=env)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_IMPORT_LIMIT_S:.0f} s")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["its process ended without a word"])[-1][:300]


# Processes of different nodes send each other pickled objects of these, or compute together.
_PACKAGES = (
    *("fusionrl", "torch", "ray", "megatron-core", "sglang", "sglang-router", "transformers", "transformer-engine"),
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
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(f"{path.relative_to(sources)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    versions["fusionrl"] = f"{versions.get('fusionrl', 'not installed')} (sources {digest.hexdigest()[:_SHOWN]})"
    return versions


def version_findings(versions: Mapping[str, Mapping[str, str]], own_node: str) -> list[Finding]:
    """Compare the versions of all nodes, by name, with those of `own_node`, where this process is."""
    if own_node not in versions:
        return []
    findings, here = [], versions[own_node]
    for name, there in versions.items():
        for package in sorted({*here, *there}):
            ours, theirs = (which.get(package, "not installed") for which in (here, there))
            if ours != theirs:
                findings.append(fault("versions", f"{package} is {ours} here and {theirs} on node {name}", CURE))
    return findings or [fact("versions", f"Python and {len(here) - 1} packages are the same on all nodes")]
