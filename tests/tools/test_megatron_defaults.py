"""Defaults that differ between Megatron's parser and its classes are found, and the page has those of the classes."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.megatron_defaults import class_defaults, differences, parser_defaults

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "from-slime.md"


def test_the_page_has_the_defaults_of_the_installed_classes() -> None:
    if not version("megatron-core").startswith("0.16."):
        pytest.skip("the page is of megatron-core 0.16")
    table = PAGE.read_text(encoding="utf-8").partition("## Defaults of Megatron's parser")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"\| `(\w+)` \| (.+?) \|", table))
    installed = {name: repr(default) for (_, name), default in class_defaults().items()}
    assert listed and listed == {name: installed.get(name) for name in listed}


def test_differences_are_found() -> None:
    source = (
        "group.add_argument('--optimizer-offload-fraction', type=float, default=1.0)\n"
        "group.add_argument('--no-rope-fusion', action='store_false', dest='apply_rope_fusion')\n"
        "group.add_argument('--lr', type=float, default=None)\n"
        "group.add_argument('--hidden-size', type=int, default=computed())\n"
    )
    assert parser_defaults(source) == {"optimizer_offload_fraction": 1.0, "apply_rope_fusion": True, "lr": None}
    assert [row[1:] for row in differences(source)] == [
        ("apply_rope_fusion", False, True),
        ("optimizer_offload_fraction", 0.0, 1.0),
    ]
