"""How to get a package that only some runs need: by the set of `requirements/` that pins it, never by hand.

Packages of a run fit only in their pinned versions (docs/get-started/install.md), so a cure never says `pip install`.
"""

SETS = {
    "examples": ("bm25s", "blake3", "datasets", "langdetect", "math-verify", "pyarrow", "xxhash", "zstandard"),
    "trackers": ("tensorboard", "wandb"),
}


def install_hint(package: str) -> str:
    """Return the cure of a missing package, by its name on PyPI (`math-verify`)."""
    for name, packages in SETS.items():
        if package in packages:
            return f"bash scripts/setup-env.sh {name} installs the version that fits"
    return f"it may change pinned packages: install {package} into an environment of its own"
