"""Rules with groups and sections: there and back for random sizes, against a loop over groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionrl.models import convert
from fusionrl.models.rules import Rule


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Rule, int]:
    """A rule of one to four tensors of one to three sections each, and a number of ranks that divides its groups."""
    size = draw(st.sampled_from([1, 2, 4]))
    groups = size * draw(st.integers(1, 3))
    rest = draw(st.sampled_from([(), (3,), (1, 4)]))
    counts = st.lists(st.integers(1, 5), min_size=1, max_size=3)
    sections = {f"t{i}": tuple(groups * n for n in draw(counts)) for i in range(draw(st.integers(1, 4)))}
    hf = {name: (sum(rows), *rest) for name, rows in sections.items()}
    several = {name: rows for name, rows in sections.items() if len(rows) > 1}
    return Rule("to", hf, "grouped", "rows", groups=groups, sections=several), size


def interleaved(rule: Rule, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The Megatron tensor row by row: of each group, its rows of each section of each tensor."""
    rows = []
    for group in range(rule.groups):
        for name, tensor in tensors.items():
            start = 0
            for count in rule.section_rows(name):
                each = count // rule.groups
                rows += [tensor[start + group * each + i] for i in range(each)]
                start += count
    return torch.stack(rows)


@settings(max_examples=80, deadline=None)
@given(grouped())
def test_groups_and_sections_there_and_back(case: tuple[Rule, int]) -> None:
    rule, size = case
    tensors = {name: torch.randn(sizes) for name, sizes in rule.hf.items()}
    full = convert.join(rule, list(tensors.values()))
    assert torch.equal(full, interleaved(rule, tensors))
    parts = [convert.split(rule, full, rank, size) for rank in range(size)]
    assert torch.equal(convert.gather(rule, parts), full)
    for name, back in zip(rule.hf, convert.take_apart(rule, full), strict=True):
        assert torch.equal(back, tensors[name])


@settings(max_examples=80, deadline=None)
@given(grouped())
def test_a_rank_reads_and_sends_its_share_of_each_section(case: tuple[Rule, int]) -> None:
    """What a rank reads of each tensor makes its part (`hf_io.read_part`); its part fills its places in each tensor
    (`weights.gather`)."""
    rule, size = case
    tensors = {name: torch.randn(sizes) for name, sizes in rule.hf.items()}
    full = convert.join(rule, list(tensors.values()))
    sent = {name: torch.zeros(sizes) for name, sizes in rule.hf.items()}
    for rank in range(size):
        shares = {name: rule.share(rank, size, name) for name in tensors}
        read = [convert.joined(convert.views(x, shares[name]), shares[name]) for name, x in tensors.items()]
        part = convert.join(rule, read, size)
        assert torch.equal(part, convert.split(rule, full, rank, size))
        for name, piece in zip(rule.hf, convert.pieces(rule, part, size), strict=True):
            convert.fill(rule, sent[name], piece, rank, size, name)
    for name, tensor in tensors.items():
        assert torch.equal(sent[name], tensor)


def test_a_join_that_a_plugin_of_earlier_versions_has_is_refused_with_its_new_name() -> None:
    join: Any = "qkv"
    with pytest.raises(ValueError, match="join 'qkv' is none of copy, .*; write grouped, with groups=shape.num_query"):
        Rule("to", {"of": (4, 2)}, join, "rows")


def test_groups_are_of_a_grouped_join() -> None:
    with pytest.raises(ValueError, match="join 'grouped' with groups 0"):
        Rule("to", {"of": (4, 2)}, "grouped", "rows")
    with pytest.raises(ValueError, match="join 'copy' with groups 2"):
        Rule("to", {"of": (4, 2)}, groups=2)
