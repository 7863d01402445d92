"""Trained tokens that no engine sampled: which are found, and what is said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.rollout import weight_versions
from fusionrl.rollout.forced_tokens import found_in, num_unsampled, warn_of_unsampled
from fusionrl.rollout.generate import custom_generate
from fusionrl.rollout.weight_versions import EngineAnswers, OriginalResponse, take_warnings
from tests.rollout.test_weight_versions import answer, context


@pytest.fixture(autouse=True)
def nothing_is_warned_of_yet() -> None:
    take_warnings()
    weight_versions._warned.clear()


@pytest.mark.parametrize(
    ("response", "parts", "found", "has_whole"),
    [
        ([5, 6, 7], [[5, 6, 7]], "111", True),
        ([5, 6, 9, 9, 7], [[5, 6], [7]], "11001", True),
        ([5, 6, 9], [[5, 6, 7, 8]], "110", False),  # cut at a stop word, then the tool's text
        ([9, 5, 6], [[5, 6]], "011", True),
        ([7, 5], [[5], [7]], "11", True),  # requests that ran side by side
        ([256, 1], [[1]], "01", True),  # bytes within a number
        ([1, 2, 8, 9], [[1, 2, 3, 4], [1, 2, 8, 9]], "1111", True),  # the second of two tries
        ([8, 9, 1, 3], [[1, 4], [8, 9, 1, 3]], "1111", True),
        ([3], [[4]], "0", False),
    ],
)
def test_tokens_of_the_answers_are_found(
    response: list[int], parts: list[list[int]], found: str, has_whole: bool
) -> None:
    got, whole = found_in(np.array(response, np.int32), [np.array(part, np.int32) for part in parts])
    assert ("".join(str(int(one)) for one in got), whole) == (found, has_whole)


def said_of(sample: Sample, *answers: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    noted = EngineAnswers((), parts=[(np.array(one, np.int32), np.zeros(len(one), np.int32), 1.0) for one in answers])
    warn_of_unsampled(
        [sample], noted, "--custom-generate-function-path f", OriginalResponse(np.array(before, np.int32), None)
    )
    return take_warnings()


def test_a_tools_text_without_a_mask_is_told() -> None:
    (said,) = said_of(Sample(index=3, tokens=[1, 5, 6, 9, 9, 7], response_length=5), [5, 6], [7])
    assert "2 of the 5 tokens that sample 3 is trained on are in no answer of the engines" in said
    assert "loss_mask" in said and "f: " in said
    assert not said_of(Sample(index=4, tokens=[1, 9], response_length=1), [5]), "once for each function"


def test_what_is_masked_or_was_sampled_is_not() -> None:
    assert not said_of(Sample(tokens=[1, 5, 9, 7], response_length=3, loss_mask=[1, 0, 1]), [5], [7])
    assert not said_of(Sample(tokens=[1, 4, 5], response_length=2), [5], before=[4])
    assert not said_of(Sample(tokens=[1, 5, 9], response_length=2, weight_versions=[0, 0]), [5])
    assert not said_of(Sample(tokens=[1, 5, 9], response_length=2)), "nobody has asked the engines"
    assert not said_of(Sample(tokens=[1, 5, 9], response_length=2), [7, 8]), "the answer was a judge's"
    assert not said_of(Sample(tokens=[1, 5, 9], response_length=2), [5], []), "of an answer only the text is known"


def test_reject_sampling_knows_which_samples_these_are() -> None:
    tool, ended = [Sample(tokens=[1, 5, *added], response_length=1 + len(added)) for added in ([9, 9, 9], [2])]
    for sample in (tool, ended):
        said_of(sample, [5])
    assert (num_unsampled(tool), num_unsampled(ended)) == (3, 0), "an end that a function adds is no tool's text"
    tool.loss_mask = [1, 0, 0, 0]
    said_of(tool, [5])
    assert num_unsampled(tool) == 0, "made anew, and right"


def test_texts_of_turns_are_no_versions_of_tokens() -> None:
    assert said_of(Sample(tokens=[1, 5, 9], response_length=2, weight_versions=["0"]), [5])


def test_a_function_that_posts_and_sets_no_mask(json_server: Any, tmp_path: Path) -> None:
    json_server.answers = [(200, answer([5], "0"))]
    url = json_server.url
    path = tmp_path / "mine.py"
    path.write_text(
        "from fusionrl.plugin_api import post\n"
        "async def f(args, sample, params):\n"
        f"    found = await post({url + '/generate'!r}, {{}})\n"
        "    sample.tokens, sample.response_length = [1, found['meta_info']['output_token_logprobs'][0][1], 7, 7], 3\n"
        "    sample.status = sample.Status.COMPLETED\n"
        "    return sample\n"
    )
    given = context(engine_urls=[], router_url=url)
    asyncio.run(custom_generate(given, f"{path}:f", Sample(index=2), {}, False))
    assert any("2 of the 3 tokens that sample 2 is trained on" in text for text in take_warnings())


def test_an_engine_is_not_asked_to_go_on_from_nothing(tmp_path: Path) -> None:
    """It would die."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from fusionrl.plugin_api import generate_turn, post\n"
        "async def no_begin(args, sample, params):\n"
        "    await generate_turn(args, sample, params)\n"
        "async def posts(args, sample, params):\n"
        "    await post('http://127.0.0.1:9/generate', {'input_ids': [], 'sampling_params': params})\n"
    )
    for name, said in (
        ("no_begin", r"sample 4 has no tokens to continue: call begin\(args, sample\) first"),
        ("posts", "input_ids is empty; give the tokens of the prompt"),
    ):
        with pytest.raises(HookError, match=rf"^--custom-generate-function-path {path}:{name}: .*{said}"):
            asyncio.run(custom_generate(context(), f"{path}:{name}", Sample(index=4), {"max_new_tokens": 4}, False))
