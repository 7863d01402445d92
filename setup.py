"""Packaging of fusionrl. Ranges stand here; the exact, tested sets stand in requirements/."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def long_description() -> str:
    """The README, where the source tree has one."""
    readme = HERE / "README.md"
    return readme.read_text() if readme.exists() else ""


setup(
    name="fusionrl",
    version="0.1.0",
    description="RL for LLMs: Megatron-core trains, SGLang generates, Ray holds them together",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["fusionrl", "fusionrl.*"]),
    package_data={
        "fusionrl.config": ["aliases.md"],
        "fusionrl.observe.view": ["assets/*"],  # the scripts and the style of `fusionrl view`
        "fusionrl.compat.slime": ["*.md"],
        "fusionrl.compat.slime.inside": ["*.sh"],
        "fusionrl.cpu": ["*.c"],  # compiled on the user's machine
    },
    # Naming the root makes an editable install put the checkout itself on the path, so that hooks such as
    # plugins.rewards.last_number.reward load from any directory and in every Ray worker.
    package_dir={"": "."},
    entry_points={"console_scripts": ["fusionrl = fusionrl.cli:main"]},
    install_requires=[
        "torch>=2.11",
        "ray>=2.52",
        "megatron-core>=0.16.1,<0.20",
        "pydantic>=2.8,<3",
        "transformers>=5.12,<6",
        "tokenizers>=0.22",
        "numpy>=2.0",
        "aiohttp>=3.12",
        "orjson>=3.9",
        "psutil>=5.9",
        "pyyaml>=6.0",
        "rich>=14",
        "safetensors>=0.5",
        "matplotlib>=3.8",
        "xxhash>=3.4",
    ],
    extras_require={
        "gpu": [
            "transformer-engine[pytorch,core_cu13]>=2.9",
            "sglang>=0.5.23,<0.6",
            "sglang-router>=0.3.2",
            "nvidia-ml-py>=12.0",
        ],
        "examples": [
            "blake3>=1.0",
            "bm25s>=0.2.14",
            "gguf>=0.17",
            "langdetect>=1.0.9",
            "math-verify[antlr4_13_2]>=0.9,<0.10",
            "pyarrow>=17",
            "reasoning-gym>=0.1.25,<0.2",
            "zstandard>=0.23",
        ],
        "dev": [
            "accelerate>=1.15",
            "hypothesis>=6.100",
            "mypy>=1.15",
            "peft>=0.21",
            "pytest>=9.0",
            "ruff>=0.14",
            "types-PyYAML",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
