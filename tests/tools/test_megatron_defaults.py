"""Defaults that differ between Megatron's parser and its classes are found."""

from __future__ import annotations

from tools.megatron_defaults import differences, parser_defaults


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
