"""Which requests of a queue go ahead, and which wait for the batch after them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fusionrl.upstream import shared_prefill
from fusionrl.upstream.shared_prefill import divide


@dataclass
class Request:
    name: str
    origin_input_ids: list[int]
    extra_key: str | None = None
    output_ids: list[int] = field(default_factory=list)


@pytest.fixture(autouse=True)
def few_tokens_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefill, "LEAST_TOKENS", 3)


def names(requests: list[Request]) -> str:
    return "".join(request.name for request in requests)


def test_one_of_each_prompt_goes_ahead_and_its_siblings_are_next() -> None:
    queue = [Request("a", [1, 2]), Request("b", [1, 2, 3]), Request("c", [1, 2]), Request("d", [1, 2, 3])]
    now, later, prompts = divide(queue, ())
    assert (names(now), names(later), len(prompts)) == ("ab", "cd", 2)
    more = [Request("e", [4, 5]), Request("f", [4, 5, 6, 7]), Request("g", [4, 5, 6, 7])]
    now, later, _ = divide([*later, *more], prompts)
    assert (names(now), names(later)) == ("cdef", "g")  # who waited goes now, wherever the one ahead is


def test_who_shares_little_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = [Request("a", [1, 2, 3, 4]), Request("b", [1, 2, 3, 4])]
    assert names(divide(queue, ())[1]) == "b"  # 3 tokens
    monkeypatch.setattr(shared_prefill, "LEAST_TOKENS", 4)
    assert divide(queue, ())[:2] == (queue, [])


def test_other_caches_and_answers_that_go_on_are_no_siblings() -> None:
    prompt = [1, 2, 3, 4]
    queue = [Request("a", prompt), Request("b", prompt, "an adapter"), Request("c", prompt, output_ids=[7])]
    assert names(divide(queue, ())[0]) == "abc"
    assert divide([], ())[:2] == ([], [])
