"""The graders behind --rm-type: expected values by hand, from what the papers and data sets ask for."""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusionrl.rewards.dispatch import length_penalty, soft_overlong_punishment
from fusionrl.rewards.instructions import INSTRUCTIONS, count_sentences, followed
from fusionrl.rewards.math_dapo_utils import compute_score, normalize_final_answer
from fusionrl.rewards.math_utils import extract_answer, grade_answer_verl, is_equal_answer
from fusionrl.rewards.registry import RM_TYPES, LabelCheck, grade, parse_rm_type, reward_of
from tests.clock import here_s


# ------------------------------------------------------------------------------------------------ boxes and math
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{3}, no: $\boxed{ \frac{1}{2} }$.", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\fbox{9}", "9"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),  # an escaped brace opens nothing
        (r"\boxed{}", ""),
        (r"\boxed{3} and \boxed{4", None),  # cut off in its last answer
        ("4", None),
    ],
)
def test_the_last_box(text: str, wanted: str | None) -> None:
    assert extract_answer(text) == wanted


@pytest.mark.parametrize(
    ("given", "truth", "wanted"),
    [
        ("x-y", "y-x", False),
        ("2, 1", "1, 2", True),  # a set of solutions
        (r"(0.5, \sqrt{12})", r"(\frac{1}{2}, 2\sqrt3)", True),
        ("east", "seat", False),  # no product of letters
        ("", "4", False),
    ],
)
def test_equal_answers(given: str, truth: str, wanted: bool) -> None:
    pytest.importorskip("math_verify")
    assert is_equal_answer(given, truth) is wanted
    assert grade_answer_verl(rf"so \boxed{{{given}}}", rf"\boxed{{{truth}}}") is wanted
    assert not grade_answer_verl(given, truth)


def test_exact() -> None:
    cases = (" 42\n", "42", 1), ("42.", "42", 0), ("42", 42, 1)
    assert all(reward_of("exact")(text, label) == wanted for text, label, wanted in cases)


def test_math_in_a_thread() -> None:
    """Rewards do not run in the main thread, the only one where math-verify's own time limits work."""
    pytest.importorskip("math_verify")
    answers, labels = (r"so \boxed{\frac{1}{2}}", r"\boxed{3}", "none"), ("0.5", r"\frac{6}{2}", "5")
    with ThreadPoolExecutor(1) as thread:
        assert list(thread.map(reward_of("math_verify"), answers, labels)) == [1.0, 1.0, 0.0]


def test_dapo() -> None:
    assert compute_score(r"Answer: \boxed{34}", 34.0) == {"score": 1.0, "acc": True, "pred": "34"}
    assert compute_score("Answer: 34" + "." * 300, "34") == {"score": -1.0, "acc": False, "pred": None}
    for text, is_right in ((r"\boxed{34}", True), (r"\boxed{34\text{ cm}}", False), ("Answer: 34", False)):
        assert compute_score(text, "34", strict_box_verify=True)["acc"] == is_right
    assert normalize_final_answer(r"the area is = $\sqrt3$ square units") == r"\sqrt{3}"


def test_gpqa() -> None:
    choices = {"choices": ["blue light", "red light", "no light", "a mirror"]}
    assert reward_of("gpqa")("i see no colour", "C", choices) == 0.0, "a letter within a word is not a choice"
    assert reward_of("gpqa")("The answer is a matter of optics.\nC", "C", choices) == 1.0, "an article"
    with pytest.raises(ValueError, match="label 'green' and metadata correct_letter None name none of the letters A"):
        reward_of("gpqa")("C", "green", choices)


# ------------------------------------------------------------------------------------------------ form
@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("a</think><answer>b</answer>", 1.0),  # the chat template opened it
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<answer>b</answer>", 0.0),
    ],
)
def test_format(response: str, wanted: float) -> None:
    assert reward_of("format")(response, None, {}) == wanted


def test_format_by_a_regex() -> None:
    form = {"format_regex": r"Reason:.+: \d+"}
    texts = (" Reason: so\nit is\nAnswer: 5 ", "Reason: so\nAnswer: 5 apples")
    assert [reward_of("format")(text, None, form) for text in texts] == [1.0, 0.0]


# ------------------------------------------------------------------------------------------------ IFEval
SECOND_PARAGRAPH = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "see"}
PARTS = {"section_spliter": "Part", "num_sections": 2}
ENGLISH = "this is a sentence about the weather of today in the north"
FOLLOWED: list[tuple[str, dict[str, Any], str, str]] = [  # id, kwargs, follows, does not
    ("keywords:existence", {"keywords": ["war", "C++"]}, "Wars in c++", "war in C"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2}, "war and warfare", "war"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "less than"}, "war", "war war"),
    ("keywords:forbidden_words", {"forbidden_words": ["field"]}, "battlefield", "a Field."),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "#a #b", "#a"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "it's", "it's me"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "a. b.", "Mr. B. Smith"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***", "a *** *** b"),
    ("length_constraints:nth_paragraph_first_word", SECOND_PARAGRAPH, "one\n\n\n\n'See, two", "see\n\nseen"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "bye\np. s. x", "bye PS x"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S. x", "P.S. x"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b c]", "[a] (b)"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "x\n* a\n  - b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "Well: My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and * *"),
    ("detectable_format:multiple_sections", PARTS, "Part 1 a Part 2", "Part A"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', 'Here: {"a": 1}'),
    ("detectable_format:title", {}, "<<On cats>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a******a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi", "Hi. Say hi."),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, '"So. any questions?"', "Any questions? No."),
    ("startend:quotation", {}, ' "a" ', '"a'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2}, "NASA, I see", "Nasa, I see"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
    ("language:response_language", {"language": "de"}, "Das Wetter ist heute im Norden sehr schön", ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.capitalize()),
    ("change_case:english_capital", {}, "THE WEATHER OF TODAY IS WHAT THEY ALL WANT TO KNOW", ENGLISH),
]


def ifeval(response: str, names: list[str], kwargs: list[Any]) -> Any:
    return reward_of("ifeval")(response, None, {"instruction_id_list": names, "kwargs": kwargs})


@pytest.mark.parametrize(("name", "kwargs", "follows", "breaks"), FOLLOWED)
def test_an_instruction(name: str, kwargs: dict[str, Any], follows: str, breaks: str) -> None:
    if "language" in name or "english" in name:
        pytest.importorskip("langdetect")
    rewards = [ifeval(text, [name], [{**kwargs, "prompt": None}]) for text in (follows, breaks, " ")]  # parquet's nulls
    assert rewards == [1.0, 0.0, 0.0]


def test_every_instruction_is_tested() -> None:
    assert {name for name, *_ in FOLLOWED} == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25  # of the paper's table 1


def test_all_instructions_are_to_be_followed() -> None:
    metadata = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, None]}
    assert followed('"a"', metadata) == {"0:punctuation:no_comma": True, "1:startend:quotation": True}
    assert reward_of("ifeval")('<think>one, two</think>"a"', None, metadata) == 1.0
    assert reward_of("ifeval")("a", None, metadata) == 0.0


@pytest.mark.parametrize(
    ("name", "kwargs", "part"),
    [
        ("a:b", [{}], "unknown instruction 'a:b'; known are keywords:existence"),
        ("keywords:existence", [{}], "keywords:existence with kwargs {}: missing"),
        ("punctuation:no_comma", [], "1 instructions, but 0 kwargs"),
        ("length_constraints:number_words", [{"num_words": 1, "relation": "about"}], "the relation 'about' is neither"),
        ("keywords:forbidden_words", [{"forbidden_words": ["sun", 3]}], "forbidden_words ['sun', 3] must be a list"),
        ("length_constraints:number_words", [{"num_words": 2.5}], "num_words 2.5 must be a whole number"),
        ("startend:end_checker", [{"end_phrase": ["a"]}], "end_phrase ['a'] must be a text"),
    ],
)
def test_bad_instructions_are_refused_for_any_response_and_when_the_data_are_read(
    name: str, kwargs: list[Any], part: str
) -> None:
    metadata = {"instruction_id_list": [name], "kwargs": kwargs}
    for response in ("text", ""):
        with pytest.raises(ValueError, match=re.escape(part)):
            reward_of("ifeval")(response, None, metadata)
    assert part in str(LabelCheck("ifeval")(None, metadata))


def test_whole_numbers_that_a_table_made_floats_count() -> None:
    names = ["length_constraints:nth_paragraph_first_word", "length_constraints:number_words"]
    first: Any = {"num_paragraphs": 2.0, "nth_paragraph": 1.0, "first_word": "one", "num_words": None}
    kwargs = [first, {"num_words": 3.0, "relation": "at least"}]
    assert [ifeval(text, names, kwargs) for text in ("One, two\n\nthree", "Two, one\n\nthree")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 0),
        ("no capitals here. none at all.", 2),
        ("Dr. J. Smith paid 3.50 dollars.", 1),
        ("Apples, pears, etc. are fruit. Etc.", 2),
        ('"Stop." He stopped. (Really.)', 3),
        ('"Wait... what? It ends without a stop "', 2),
    ],
)
def test_sentences(text: str, wanted: int) -> None:
    assert count_sentences(text) == wanted


@pytest.mark.parametrize("unit", [".", "\n", "[", "<<", "*", "A", "Answer:", "</think>", r"\boxed{"])
@pytest.mark.parametrize("kind", sorted(set(RM_TYPES) - {"math_verify", "random", "ifbench"}))
def test_a_response_that_repeats_itself_is_graded_soon(kind: str, unit: str) -> None:
    """An untrained policy fills its context with one token; no grader may take long over it, or fail."""
    response = unit * (40_000 // len(unit))
    names = [name for name in INSTRUCTIONS if "language" not in name and "english" not in name]
    arguments = {name: kwargs for name, kwargs, *_ in FOLLOWED}
    metadata = {"choices": ["a", "b", "c"], "instruction_id_list": names, "kwargs": [arguments[name] for name in names]}
    label = {"gpqa": "C", "code": '["assert True"]', "code_all": '["assert True"]'}.get(kind, "4")
    start = time.perf_counter()
    grade(kind, response, label, metadata)
    if kind != "deepscaler":
        grade(f"boxed_{kind}", rf"\boxed{{{response}}}", label, metadata)
    assert time.perf_counter() - start < here_s(2)


# ------------------------------------------------------------------------------------------------ length
def test_rewards_for_length() -> None:
    """Equation 13 of DAPO with its own numbers: L_max 20480, L_cache 4096; and a price for each token."""
    found = [soft_overlong_punishment(n, 20480, 4096) for n in (1, 16384, 17408, 18432, 20480, 30000)]
    assert found == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    for buffer in (0, 9):
        with pytest.raises(ValueError, match=f"overlong buffer of {buffer} tokens must lie between 1 and 8"):
            soft_overlong_punishment(1, 8, buffer)
    assert [length_penalty(n, 100, 0.5) for n in (0, 50, 100)] == [0.0, -0.25, -0.5]


# ------------------------------------------------------------------------------------------------ --rm-type
def test_a_reward_model_in_a_sum() -> None:
    assert grade("reward_model", "x", None, model_score=-2.5) == (-2.5, {}, {})
    graded = grade("reward_model:0.5+last_number:2", "it is 42", "42", model_score=-1.0)
    assert graded == (1.5, {"reward_model": -1.0, "last_number": 1.0}, {})
    with pytest.raises(ValueError, match=r"reward_model needs async_rm"):
        grade("reward_model+exact", "x", "x")


def test_a_weighted_sum() -> None:
    response = "<think>a</think><answer>42</answer>"
    graded = grade("last_number:0.8 + format:0.2", response, "41", {})
    assert graded.reward == pytest.approx(0.2)
    assert graded.parts == {"last_number": 0.0, "format": 1.0}
    assert grade("last_number+format:-1e-1", response, "42", {}).reward == pytest.approx(0.9)
    assert grade("dapo:0.5", "Answer: 5", "5").reward == 0.5
    assert grade("last_number", response, "42") == (1.0, {}, {})
    assert grade("dapo", "Answer: 5", "5").reward == {"score": 1.0, "acc": True, "pred": "5"}


def test_the_last_box_alone_is_graded() -> None:
    response = r"\boxed{blue cat}, no: \boxed{red cat}. Or 7?"
    for kind, text, label, reward in (
        ("f1", response, "red dog", 0.5),
        ("last_number", response, "7", 0.0),
        ("exact", "red cat", "red cat", 0.0),
    ):
        assert grade(f"boxed_{kind}", text, label).reward == pytest.approx(reward)
    assert grade("boxed_dapo", r"Answer: 5, \boxed{6}", "6").reward["acc"]  # type: ignore[index]
    assert grade("boxed_exact:2+exact", response, "red cat").parts == {"boxed_exact": 1.0, "exact": 0.0}


@pytest.mark.parametrize(
    ("rm_type", "part"),
    [
        ("exakt", "exakt: unknown reward 'exakt'; known are code, code_all, "),
        ("exact:0.5+", "the weight '0.5+' is not a number"),
        ("exact:", "the weight '' is not a number other than 0; write name:weight+name:weight"),
        ("exact:0+f1", "the weight '0'"),
        ("exact:nan", "the weight 'nan'"),
        ("exact:1+exact:2", "exact is given twice"),
        ("boxed_deepscaler", "leave boxed_ out"),
        ("boxed_reward_model", "unknown reward 'boxed_reward_model'"),
    ],
)
def test_a_bad_rm_type(rm_type: str, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        parse_rm_type(rm_type)


IFBENCH = """
from collections import namedtuple
InputExample = namedtuple("InputExample", "key instruction_id_list prompt kwargs")
Found = namedtuple("Found", "follow_all_instructions")
def test_instruction_following_strict(asked, responses):
    assert (asked.key, asked.instruction_id_list) == (3, ["count:numbers", "words:last"]), asked
    assert asked.kwargs == [{"N": 2}, {}], asked
    return Found(responses[asked.prompt] == "1 2")
"""


def test_ifbench_asks_its_own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"instruction_id_list": ["count:numbers", "words:last"], "record_id": "3", "prompt_text": "Two numbers."}
    metadata["kwargs"] = [{"N": 2, "word": None}, {"word": None}]  # parquet's nulls
    with pytest.raises(ValueError, match="clone https://github.com/allenai/IFBench"):
        reward_of("ifbench")("1 2", None, metadata)
    (tmp_path / "evaluation_lib.py").write_text(IFBENCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [reward_of("ifbench")(text, None, metadata) for text in ("1 2", "1")] == [1.0, 0.0]
    for empty in (None, [], [" "], "count:numbers"):
        with pytest.raises(ValueError, match="instruction_id_list"):
            reward_of("ifbench")("1", None, {"instruction_id_list": empty})
    spaced = {**metadata, "instruction_id_list": [" count:numbers", None, "words:last\n"], "kwargs": [{"N": 2}, {}, {}]}
    assert reward_of("ifbench")("1 2", None, spaced) == 1.0
    repeated = {**metadata, "kwargs": [{"N": 2}]}  # the last arguments are those of the rest, as in slime
    with pytest.raises(AssertionError, match=r"kwargs=\[\{'N': 2\}, \{'N': 2\}\]"):
        reward_of("ifbench")("1", None, repeated)
    sys.modules.pop("evaluation_lib")
