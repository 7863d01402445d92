"""Verifiable instructions: IFEval's (arXiv:2311.07911), each checked by a rule, and IFBench's, by its own program.

A sample's metadata carries `instruction_id_list` and `kwargs`, a dict for each instruction, as in the data set. Two
things differ from the authors' program: sentences are counted by a rule and not by nltk's trained model, and keywords
are plain text and not regular expressions. IFBench is the user's checkout, found on PYTHONPATH.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusionrl.base.wording import install_hint
from fusionrl.rewards.registry import Reward
from fusionrl.rewards.text_match import after_thinking


def ifeval(response: str, label: object, metadata: Mapping[str, object] | None = None) -> float:
    """1 where the response, after its thinking, follows every instruction (the paper's strict prompt-level accuracy).

    Raises ValueError if the metadata has no instructions, or one that is unknown or has unfit arguments; or the package
    langdetect is not installed and an instruction needs it.
    """
    return float(all(followed(response, metadata or {}).values()))


def followed(response: str, metadata: Mapping[str, object]) -> dict[str, bool]:
    """Per instruction, by "position:id", whether it is followed; an empty response follows none. Raises as `ifeval`."""
    ids, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not ids:
        raise ValueError("--rm-type ifeval: the metadata has no instruction_id_list; --metadata-key names its column")
    if not isinstance(ids, list | tuple) or not all(isinstance(name, str) for name in ids):
        raise ValueError(f"--rm-type ifeval: instruction_id_list {ids!r} is not a list of names")
    arguments = [{} for _ in ids] if arguments is None else arguments
    if not isinstance(arguments, list | tuple) or not all(isinstance(item or {}, Mapping) for item in arguments):
        raise ValueError(f"--rm-type ifeval: kwargs {arguments!r} is not a list of dicts, one for each instruction")
    if len(arguments) != len(ids):
        raise ValueError(f"--rm-type ifeval: {len(ids)} instructions, but {len(arguments)} kwargs")
    response = after_thinking(response)
    return {
        f"{i}:{name}": _check(name, response, item or {})
        for i, (name, item) in enumerate(zip(ids, arguments, strict=True))
    }


def _check(name: str, response: str, arguments: Mapping[str, object]) -> bool:
    if name not in INSTRUCTIONS:
        raise ValueError(f"--rm-type ifeval: unknown instruction {name!r}; known are {', '.join(INSTRUCTIONS)}")
    arguments = {
        key: whole_number(value) for key, value in arguments.items() if value is not None
    }  # parquet adds nulls
    signature = inspect.signature(INSTRUCTIONS[name])
    try:
        signature.bind(response, **arguments)
        for key, value in arguments.items():
            _check_type(key, value, signature.parameters[key].annotation)
    except TypeError as error:
        raise ValueError(f"--rm-type ifeval: {name} with kwargs {arguments}: {error}") from error
    # An instruction that is not valid raises for an empty response, too: so labels are checked before a run.
    return INSTRUCTIONS[name](response, **arguments) and bool(response.strip())


def whole_number(value: object) -> object:
    """Return a float without a fraction as an int: a column of integers with a null in it is read as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_type(name: str, value: object, annotation: type) -> None:
    is_right, expected = {
        int: (isinstance(value, int) and not isinstance(value, bool), "a whole number"),
        str: (isinstance(value, str), "a text"),
        Sequence[str]: (isinstance(value, list | tuple) and all(isinstance(i, str) for i in value), "a list of texts"),
    }[annotation]
    if not is_right:
        raise TypeError(f"{name} {value!r:.80} must be {expected}")


def _compared(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"--rm-type ifeval: the relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= bound if relation == "at least" else count < bound


# -------------------------------------------------------------------------------- keywords
def keywords_existence(text: str, keywords: Sequence[str]) -> bool:
    """The text contains every keyword, in any case, inside words too."""
    return all(word.strip().lower() in text.lower() for word in keywords)


def keywords_frequency(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    """The text contains the keyword at least, or less than, so many times."""
    return _compared(text.lower().count(keyword.strip().lower()), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """The text contains none of the words as a whole word."""
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    """The text contains the letter (any character), in either case, at least, or less than, so many times."""
    return _compared(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


# -------------------------------------------------------------------------------- lengths
def number_words(text: str, num_words: int, relation: str = "at least") -> bool:
    """A word is a run of letters, digits and underscores."""
    return _compared(len(re.findall(r"\w+", text)), relation, num_words)


_END = re.compile(r"(?<![.!?])([.!?]++)[\"'”’)\]*_]*+(?=\s++(\S))")
_TITLE = re.compile(r"\b(?:(?i:mr|mrs|ms|dr|prof|st|jr|sr|vs|e\.g|i\.e)|[A-HJ-Z])\.$")  # a name or more follows
_ABBREVIATION = re.compile(r"(?:\b(?:etc|inc|ltd|co|approx|(?:[a-z]\.)+[a-z])|\.\.)\.$", re.IGNORECASE)


def count_sentences(text: str) -> int:
    """Sentences end at . ! or ? before a space; not after Mr. or an initial, nor after etc. or ... in lower case."""
    count, start = 0, 0
    for end in _END.finditer(text):
        sentence = text[max(start, end.end(1) - 20) : end.end(1)]
        if not _TITLE.search(sentence) and not (end[2].islower() and _ABBREVIATION.search(sentence)):
            count, start = count + 1, end.end()
    return count + bool(re.search(r"\w", text[start:]))


def number_sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    """At least, or less than, so many sentences."""
    return _compared(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, divided by `***`, none between two dividers empty."""
    paragraphs = _without_empty_ends(text.split("***"))
    return len(paragraphs) == num_paragraphs and all(paragraphs)


def _without_empty_ends(pieces: Sequence[str]) -> list[str]:
    stripped = [piece.strip() for piece in pieces]
    return stripped[not stripped[0] : len(stripped) - (not stripped[-1])]


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs, divided by an empty line; the nth (from 1) starts with the word."""
    paragraphs = [piece.strip() for piece in text.split("\n\n") if piece.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = re.match(r"[^.,?!'\"]*", paragraphs[nth_paragraph - 1].split()[0].lstrip("'\""))
    return word is not None and word[0].lower() == first_word.lower()


# -------------------------------------------------------------------------------- content and format
def postscript(text: str, postscript_marker: str) -> bool:
    """A postscript starts with the marker; between its letters one space may stand."""
    marker = postscript_marker.strip().lower()
    spaced = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}
    return re.search(spaced.get(marker, re.escape(marker)), text.lower()) is not None


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """At least so many [placeholders]."""
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Exactly so many lines start with `* ` (no bold text) or with `-`."""
    return sum(re.match(r"\s*(?:\*[^*]|-)", line) is not None for line in text.split("\n")) == num_bullets


def constrained_response(text: str) -> bool:
    """The text contains one of three given answers."""
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """At least so many *highlighted* or **highlighted** pieces, each within a line and not empty."""
    single = [piece.strip("*").strip() for piece in re.findall(r"\*[^\n*]*\*", text)]
    double = [piece.strip() for piece in re.findall(r"\*\*([^\n*]*)\*\*", text)]
    return sum(map(bool, single + double)) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections headed by the word and a number (`Section 1`)."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """All of it is one JSON value, in a code fence or not."""
    body = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """The text contains a title in double angular brackets: <<title>>."""
    for line in text.split("\n"):
        _, opened, rest = line.partition("<<")
        inside, closed, _ = rest.rpartition(">>")
        if opened and closed and inside.strip("<> \t"):
            return True
    return False


# -------------------------------------------------------------------------------- combination, start and end
def two_responses(text: str) -> bool:
    """Two different responses, divided by six asterisks."""
    responses = _without_empty_ends(text.split("******"))
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """It starts with the prompt, word for word, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """It ends with the phrase, in any case; quotation marks around the whole do not count."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """All of it stands between double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == '"' == text[-1]


# -------------------------------------------------------------------------------- case, punctuation, language
def english_capital(text: str) -> bool:
    """English, in capital letters alone."""
    return text.isupper() and response_language(text, "en")


def english_lowercase(text: str) -> bool:
    """English, without capital letters."""
    return text.islower() and response_language(text, "en")


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    """At least, or less than, so many words in capital letters (NASA, I, A)."""
    words = re.findall(r"\w+(?:[-.&/]\w+)*", text)
    return _compared(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def no_comma(text: str) -> bool:
    """Not a single comma."""
    return "," not in text


def response_language(text: str, language: str) -> bool:
    """The language by its ISO 639-1 code, as langdetect sees it; a text without a word passes."""
    try:
        import langdetect
    except ImportError as error:
        raise ValueError(f"--rm-type ifeval needs the package langdetect; {install_hint('langdetect')}") from error
    langdetect.DetectorFactory.seed = 0  # it draws at random otherwise, and a reward would not be repeatable
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:
        return True


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keywords_existence,
    "keywords:frequency": keywords_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:postscript": postscript,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "change_case:capital_word_frequency": capital_word_frequency,
    "punctuation:no_comma": no_comma,
    "language:response_language": response_language,
}

IFEVAL = Reward(
    ifeval,
    lambda label, metadata: followed("", metadata),
    reads_metadata=True,
    label="unread",
    package="langdetect",
    is_slow_to_check=True,
)


LIBRARY = "evaluation_lib"  # the module of the checkout that grades
MISSING = "clone https://github.com/allenai/IFBench, install its requirements, and put the folder on PYTHONPATH"


def compute_ifbench_reward(response: str, label: object, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1 where the response follows every instruction, as IFBench's strict program says.

    metadata  `instruction_id_list`; `kwargs`, a dict for each instruction, or one for all; `prompt_text`, `record_id`

    Raises ValueError if the metadata has no instructions, or the program is not there.
    """
    metadata = metadata or {}
    names = instructions(metadata)
    try:
        library = importlib.import_module(LIBRARY)
    except ImportError as error:
        raise ValueError(f"--rm-type ifbench: IFBench's own program is missing ({error}); {MISSING}") from error
    example = library.InputExample(
        key=int(metadata.get("record_id") or 0),
        instruction_id_list=names,
        prompt=str(metadata.get("prompt_text") or ""),
        kwargs=_arguments(metadata.get("kwargs"), len(names)),
    )
    result = library.test_instruction_following_strict(example, {example.prompt: response})
    return float(result.follow_all_instructions)


def instructions(metadata: Mapping[str, object]) -> list[str]:
    """Return the names of the instructions. Raises ValueError if there are none."""
    column = metadata.get("instruction_id_list")
    listed = column if isinstance(column, list | tuple) else ()
    names = [name.strip() for name in listed if isinstance(name, str) and name.strip()]
    if not names or any(not isinstance(name, str | None) for name in listed):
        raise ValueError(
            f"--rm-type ifbench: instruction_id_list {column!r:.80} of the metadata is not a list of names;"
            " --metadata-key names its column"
        )
    return names


def _arguments(arguments: object, count: int) -> list[dict[str, object]]:
    """Return the arguments of each instruction; a table's column has a null where an instruction has no such one.

    If the list is too short, its last item is repeated, as in slime.
    """
    each = arguments if isinstance(arguments, list | tuple) else [arguments] * count
    each = [*each[:count], *([each[-1]] if each else [{}]) * (count - len(each))]
    return [
        {name: whole_number(value) for name, value in argument.items() if value is not None}
        if isinstance(argument, Mapping)
        else {}
        for argument in each
    ]


IFBENCH = Reward(
    compute_ifbench_reward,
    lambda label, metadata: instructions(metadata),
    reads_metadata=True,
    label="unread",
    package=LIBRARY,
    cure=MISSING,
)
