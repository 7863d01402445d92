"""Weight versions of samples whose function asks the engines by `post` and knows nothing of versions."""

import argparse
import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.rollout import weight_versions
from fusionrl.rollout.generate import SampleContext, custom_generate
from fusionrl.rollout.weight_versions import (
    EngineAnswers,
    OriginalResponse,
    fill_versions,
    found_in,
    note_answer,
    noting_answers,
    num_unsampled,
    take_warnings,
    warn_of_unsampled,
)

URL = "http://engine:1"
URLS = [URL, "http://engine:2"]


def make(path: str, sample: Sample, params: dict[str, Any] | None = None, **flags: Any) -> Any:
    """What the generate function makes of the sample, as a run calls it."""
    given = {"custom_generate_function_path": None, "rollout_sample_hook_path": [], "semaphore": None}
    scored = {"rm_type": None, "custom_rm_path": None, "reward_timeout_s": 1.0}
    context = SampleContext.of_args(argparse.Namespace(**given, **scored, **flags))
    return asyncio.run(custom_generate(context, path, sample, params or {}, False))


def answer(tokens: list[int], version: Any, **more: Any) -> dict[str, Any]:
    logprobs = [[-1.0, token, None] for token in tokens]
    meta = {"output_token_logprobs": logprobs, "finish_reason": {"type": "stop"}} | more
    return {"text": "", "meta_info": meta | ({} if version is None else {"weight_version": version})}


def written(folder: Path, text: str) -> str:
    """Write a file of hooks; returns the path of its function f."""
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:f"


def by_hand(*parts: tuple[list[int], int]) -> Sample:
    """A sample as slime's functions make it, of (tokens, mask) one after the other."""
    tokens = [token for part, _ in parts for token in part]
    mask = [value for part, value in parts for _ in part]
    made = Sample(index=3, tokens=[1, 2, *tokens], response_length=len(tokens), loss_mask=mask)
    made.rollout_log_probs = [-float(value) for value in mask]
    return made


def forget_warnings() -> None:
    take_warnings()
    weight_versions._warned.clear()


nothing_is_warned_of_yet = pytest.fixture(autouse=True)(forget_warnings)


def filled(sample: Sample, *answers: dict[str, Any], before: OriginalResponse | None = None, **options: Any) -> Any:
    with noting_answers(URLS, **options) as noted:
        for one in answers:
            note_answer(f"{URL}/generate", one, {})
    fill_versions([sample], noted, "--custom-generate-function-path f", before)
    return None if sample.weight_versions is None else list(sample.weight_versions)


def test_turns_of_one_version() -> None:
    sample = by_hand(([5, 6], 1), ([7], 0), ([8], 1))
    assert filled(sample, answer([5, 6], "4"), answer([8], "4")) == [4, 4, 4, 4]
    assert filled(by_hand(([5], 1), ([99], 1)), answer([5, 6, 7], "4")) == [4, 4], "a turn that was cut by hand"
    assert take_warnings() == []


def test_turns_of_different_versions_are_found_by_their_tokens() -> None:
    sample = by_hand(([3], 0), ([5, 6], 1), ([7, 7], 0), ([5, 6, 8], 1))
    assert filled(sample, answer([5, 6], "4"), answer([5, 6, 8], "5")) == [4, 4, 4, 4, 4, 5, 5, 5]
    spans = {"weight_versions": [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]}
    assert filled(by_hand(([5, 6], 1)), answer([5, 6], "5", **spans)) == [4, 5]
    # The bytes of a token can also lie across two others: that is no place.
    assert filled(by_hand(([1 << 24, 1, 256], 1)), answer([1 << 16], "3"), answer([256], "4")) == [-1, -1, 4]
    # Several samples of one call.
    parts = [(np.array([token], np.int32), np.array([version], np.int32), 1.0) for token, version in ((5, 3), (6, 4))]
    both: Any = [by_hand(([6], 1)), by_hand(([5], 1))]
    fill_versions(both, EngineAnswers((), parts=parts, versions={3, 4}), "f")
    assert [list(one.weight_versions) for one in both] == [[4], [3]]


def test_what_cannot_be_known_is_said_once() -> None:
    assert filled(by_hand(([5, 6], 1), ([7], 0))) is None, "asked by other means"
    (text,) = take_warnings()
    assert text.startswith("--custom-generate-function-path f: the weight versions")
    assert filled(by_hand(([5], 1))) is None and take_warnings() == [], "once"
    forget_warnings()
    # Of two versions, where one turn was tokenized again: that of the other is known.
    sample = by_hand(([5, 6], 1), ([7], 0), ([50], 1))
    assert filled(sample, answer([5, 6], "4"), answer([8], "5")) == [4, 4, 4, -1] and len(take_warnings()) == 1
    # Without tokens, as of a whole rollout, only one version can be told.
    assert filled(by_hand(([5], 1)), answer([5], "4"), keeps_tokens=False) == [4]
    assert filled(by_hand(([5], 1)), answer([5], "4"), answer([6], "5"), keeps_tokens=False) is None


def test_where_nothing_is_trained_nothing_is_missing() -> None:
    removed = by_hand(([5], 1))
    removed.remove_sample = True
    assert filled(by_hand(([5], 0))) is None and filled(removed) is None and filled(Sample(tokens=[1])) is None
    assert take_warnings() == []


def test_what_the_function_says_itself_stays() -> None:
    sample = by_hand(([5, 6], 1))
    sample.weight_versions = ["2", "3"]  # type: ignore[list-item]
    assert filled(sample, answer([5, 6], "4")) == [2, 3]
    sample.weight_versions = [2, 3, 4]
    assert filled(sample, answer([5, 6], "4")) == [2, 3, 4], "the check of samples says that it does not fit"


def test_a_sample_of_an_earlier_rollout() -> None:
    first = by_hand(([5, 6], 1))
    first.weight_versions = np.array([2, 2], np.int32)
    before = OriginalResponse.of(first)
    longer, anew = by_hand(([5, 6, 7], 1)), by_hand(([5, 8], 1))
    longer.weight_versions = anew.weight_versions = first.weight_versions
    assert filled(longer, answer([7], "3"), before=before) == [2, 2, 3]
    assert filled(anew, answer([5, 8], "3"), before=before) == [2, 3]


def test_a_text_for_a_turn_is_of_that_turn_alone() -> None:
    """slime's functions append one; what an earlier rollout sampled keeps its versions."""

    def resumed(*texts: str, mask: Any = None, held: Any = (2, 3)) -> tuple[Sample, OriginalResponse]:
        first = by_hand(([5, 6], 1))
        first.weight_versions = np.array([2, 3], np.int32)
        before = OriginalResponse.of(first)
        longer = by_hand(([5, 6, 7, 8, 9], 1))
        longer.loss_mask = mask
        longer.weight_versions = [*held, *texts]
        return longer, before

    two_turns = [1, 1, 1, 0, 1]
    for (sample, before), answers, versions in (
        (resumed("7"), [], [7, 7, 7]),
        (resumed("7", held=[]), [], [7, 7, 7]),  # a list of its own: texts are of turns since
        (resumed("6", "7", held=[], mask=two_turns), [], [6, 6, 7]),  # a text for each turn
        (resumed("7"), [answer([7, 8, 9], "8")], [8, 8, 8]),  # the engine knows better
        (resumed("7", mask=two_turns), [answer([7], "6"), answer([9], "7")], [6, 6, 7]),
    ):
        assert filled(sample, *answers, before=before) == [2, 3, *versions]
    fresh = by_hand(([5, 6], 1), ([7], 0), ([8], 1))
    fresh.weight_versions = ["4", "5"]  # type: ignore[list-item]
    assert filled(fresh) == [4, 4, 4, 5]
    unknown = by_hand(([5, 6, 7], 1))
    assert filled(unknown, answer([7], "4"), before=OriginalResponse.of(by_hand(([5, 6], 1)))) == [-1, -1, 4]


def test_a_text_of_a_turn_outlives_the_tokens_of_a_tool() -> None:
    sample = by_hand(([5, 6], 1))
    sample.weight_versions = ["3"]  # type: ignore[list-item]
    sample.append_response_tokens(tokens=[7], trainable=False)
    assert filled(copy.deepcopy(sample)) == [3, 3, 3]
    sample.append_response_tokens(tokens=[8], log_probs=[-1.0])
    sample.weight_versions.append("4")  # type: ignore[union-attr]
    sample.append_response_tokens(tokens=[9], trainable=False, versions=4)
    assert filled(sample) == [3, 3, 3, 4, 4]


def test_a_function_appends_a_text_to_a_sample_of_an_earlier_rollout(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "async def f(args, sample, params):\n"
        "    sample.tokens, sample.loss_mask = sample.tokens + [7], sample.loss_mask + [1]\n"
        "    sample.rollout_log_probs, sample.response_length = sample.rollout_log_probs + [-1.0], 3\n"
        "    sample.weight_versions.append('3')\n"
        "    sample.status = sample.Status.COMPLETED\n"
        "    return sample\n",
    )
    for former, versions in ((None, [-1, -1, 3]), (np.array([2, 2], np.int32), [2, 2, 3])):
        sample = by_hand(([5, 6], 1))
        sample.weight_versions, sample.status = former, Sample.Status.ABORTED
        assert make(path, sample).weight_versions == versions
    named = by_hand(([5, 6], 1))
    named.weight_versions = ["default", "2"]  # type: ignore[list-item]
    assert OriginalResponse.of(named).versions is None, "texts, as a rollout function of slime's leaves them"


def test_only_the_policys_engines_are_heard() -> None:
    with noting_answers(URLS) as noted:
        for number, url in enumerate(("http://judge:1", "http://engine:11", *reversed(URLS))):
            note_answer(f"{url}/generate", answer([5], str(number)), {})
        note_answer(f"{URL}/flush_cache", {"success": True}, {})
        note_answer(f"{URL}/v1/models", ["text"], {})
    assert noted.versions == {2, 3}
    note_answer(f"{URL}/generate", answer([5], "6"), {})
    assert noted.versions == {2, 3}, "the call is over"


def test_answers_of_another_adapter_are_a_judges() -> None:
    """And those of the weights alone, whose version is for ever that of the first push."""
    for adapter, wanted in ((None, {1, 3, 4}), ("math", {1, 3})):
        with noting_answers(URLS) as noted:
            noted.adapter = adapter
            for number, name in enumerate((None, "base", "math", "code"), 1):
                note_answer(f"{URL}/generate", answer([5], str(number)), {} if name is None else {"lora_path": name})
        assert noted.versions == wanted


POSTS = """
import asyncio, copy
from fusionrl.plugin_api import post, run
async def alone(ask): return await ask
async def in_a_task(ask): return (await asyncio.gather(ask))[0]
async def in_a_thread(ask): return await asyncio.to_thread(asyncio.run, ask)
async def by_the_plugin_loop(ask): return await asyncio.to_thread(run, ask)
async def f(args, sample, params):
    output = await globals()[params["way"]](post(args.router_url + "/generate", {"input_ids": [1, 2]}))
    made = [copy.deepcopy(sample), sample]
    for one in made:
        response = [item[1] for item in output["meta_info"]["output_token_logprobs"]] + params.get("added", [])
        one.tokens, one.response_length = [1, 2] + response, len(response)
        one.rollout_log_probs = [-1.0] * len(response)
    return made
"""


@pytest.mark.parametrize("way", ["alone", "in_a_task", "in_a_thread", "by_the_plugin_loop"])
def test_a_function_that_posts(json_server: Any, tmp_path: Path, way: str) -> None:
    json_server.answers = [(200, answer([5, 6], "4"))]
    flags = {"router_url": json_server.url, "engine_urls": []}
    made = make(written(tmp_path, POSTS), Sample(index=1), {"way": way}, **flags)
    assert [list(one.weight_versions) for one in made] == [[4, 4], [4, 4]]
    assert take_warnings() == []


def test_a_function_that_posts_and_sets_no_mask_is_warned_of(json_server: Any, tmp_path: Path) -> None:
    json_server.answers = [(200, answer([5, 6], "4"))]
    flags = {"router_url": json_server.url, "engine_urls": []}
    make(written(tmp_path, POSTS), Sample(index=2), {"way": "alone", "added": [7, 7]}, **flags)
    assert any("2 of the 4 tokens that sample 2 is trained on" in text for text in take_warnings())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sample.response_length = 3", "response_length 3 exceeds its 0 tokens"),
        ("sample.tokens, sample.response_length, sample.loss_mask = [1], 1, []", "loss_mask has 0 values for 1"),
        ("sample.tokens, sample.response_length = None, 1", "NoneType"),
        ("sample.tokens, sample.response_length, sample.weight_versions = [1], 1, [1, 2]", "weight_versions has 2"),
        ("sample.status = sample.Status.PENDING", "sample 4 .* is pending"),
        # An engine that is asked to go on from nothing dies.
        ("await generate_turn(args, sample, params)", r"sample 4 has no tokens to continue: call begin\("),
        ("await post('http://127.0.0.1:9/generate', {'input_ids': []})", "input_ids is empty; give the tokens"),
    ],
)
def test_mistakes_of_a_function_name_it(tmp_path: Path, line: str, said: str) -> None:
    imports = "from fusionrl.plugin_api import generate_turn, post\n"
    path = written(tmp_path, f"{imports}async def f(args, sample, params):\n    {line}\n    return sample\n")
    with pytest.raises(HookError, match=f"^--custom-generate-function-path {path}: .*{said}"):
        make(path, Sample(index=4), {"max_new_tokens": 4})


def test_a_function_that_is_not_async_is_warned_of_once(tmp_path: Path) -> None:
    """One of which a look at it does not tell. A failed sample needs no tokens."""
    text = "def fail(sample):\n    sample.status = sample.Status.FAILED\n    return sample\n"
    path = written(tmp_path, text + "f = lambda args, sample, params: fail(sample)\n")
    for index in (1, 2):
        make(path, Sample(index=index))
    (warning,) = take_warnings()
    assert warning.startswith(f"--custom-generate-function-path {path}: it is not async")


def test_the_temperatures_of_a_function_s_own_requests_are_noted() -> None:
    def noted(sample: Sample, *requests: tuple[list[int], object]) -> Any:
        with noting_answers([URL]) as answers:
            for tokens, params in requests:
                note_answer(f"{URL}/generate", answer(tokens, "4"), {"sampling_params": params})
        fill_versions([sample], answers, "f")
        return sample.temperature

    for params, temperature in (({"temperature": 1.1}, 1.1), ({}, 1.0), (None, 1.0)):  # SGLang's default is 1
        assert noted(by_hand(([5, 6], 1)), ([5, 6], params)) == temperature
    two = noted(by_hand(([5], 1), ([9], 0), ([6, 7], 1)), ([5], {"temperature": 0.5}), ([6, 7], {"temperature": 2}))
    assert list(two) == [0.5, 0.5, 2.0, 2.0]
    by_itself = by_hand(([5, 6], 1))
    by_itself.temperature = 0.9  # the function knows better
    assert noted(by_itself, ([5, 6], {"temperature": 1.1})) == 0.9


def test_temperatures_that_cannot_be_told_apart_are_warned_of() -> None:
    """Of a rollout function no tokens are kept: it may also have asked a judge."""
    with noting_answers([URL], keeps_tokens=False) as answers:
        for temperature in (1.1, 0.3):
            note_answer(f"{URL}/generate", answer([5, 6], "4"), {"sampling_params": {"temperature": temperature}})
    samples = [by_hand(([5, 6], 1)), by_hand(([5, 6], 1))]
    samples[0].temperature = 1.1
    fill_versions(samples[:1], answers, "f")
    assert take_warnings() == []
    fill_versions(samples, answers, "f")
    (text,) = take_warnings()
    assert "several temperatures" in text and "set sample.temperature" in text


# ------------------------------------------------------------------------------------------------ tokens of no engine
@pytest.mark.parametrize(
    ("response", "parts", "found", "has_whole"),
    [
        ([5, 6, 7], [[5, 6, 7]], "111", True),
        ([5, 6, 9, 9, 7], [[5, 6], [7]], "11001", True),
        ([5, 6, 9], [[5, 6, 7, 8]], "110", False),  # cut at a stop word, then the tool's text
        ([7, 5], [[5], [7]], "11", True),  # requests that ran side by side
        ([256, 1], [[1]], "01", True),  # bytes within a number
        ([1, 2, 8, 9], [[1, 2, 3, 4], [1, 2, 8, 9]], "1111", True),  # the second of two tries
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
    forget_warnings()
    texts = ["0"]  # of turns: no versions of tokens
    assert said_of(Sample(tokens=[1, 5, 9], response_length=2, weight_versions=texts), [5])  # type: ignore[arg-type]


def test_what_is_masked_or_was_sampled_is_not() -> None:
    assert not said_of(Sample(tokens=[1, 5, 9, 7], response_length=3, loss_mask=[1, 0, 1]), [5], [7])
    assert not said_of(Sample(tokens=[1, 4, 5], response_length=2), [5], before=[4])
    assert not said_of(Sample(tokens=[1, 5, 9], response_length=2, weight_versions=[0, 0]), [5])
    assert not said_of(Sample(tokens=[1, 5, 9], response_length=2)), "no request was sent"
    assert not said_of(Sample(tokens=[1, 5, 9], response_length=2), [7, 8]), "the answer was a judge's"
    assert not said_of(Sample(tokens=[1, 5, 9], response_length=2), [5], []), "of an answer only the text is known"


def test_reject_sampling_knows_which_samples_these_are() -> None:
    tool, ended = [Sample(tokens=[1, 5, *added], response_length=1 + len(added)) for added in ([9, 9, 9], [2])]
    for sample in (tool, ended):
        said_of(sample, [5])
    assert (num_unsampled(tool), num_unsampled(ended)) == (3, 0), "an end token that a function adds does not count"
    tool.loss_mask = [1, 0, 0, 0]
    said_of(tool, [5])
    assert num_unsampled(tool) == 0, "made anew, and right"
