"""Every flag in every spelling: the field gets the value that the help promises, and a mistake is one message."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import FIELDS, GROUPS, Config, switches
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import build_parser, read_args
from tests.config.flag_values import values_of

SWITCHES = switches()
OTHERS = [field for field in FIELDS if field not in SWITCHES]
# A preset sets other fields, and the values of this file are merged into the `args` of hooks: in turn with the others.
ALONE = {"algorithm", "custom_config_path"}


def flat(config: Config) -> dict[str, Any]:
    return {name: value for group in GROUPS for name, value in vars(getattr(config, group)).items()}


def read(argv: Iterable[str]) -> tuple[dict[str, Any], set[str]]:
    """The fields of a command line without a mistake, and those that it says it gave."""
    config, errors = read_args(list(argv))
    assert errors == []
    return flat(config), set(config.given())


@pytest.mark.parametrize(
    ("spelling", "value"), [("", True), ("=true", True), ("=True", True), ("=false", False), ("=FALSE", False)]
)
def test_switches(spelling: str, value: bool) -> None:
    """`--x` and `--x=true` are on, `--x=false` off; of several the last one counts."""
    argv = [flag_of(field) + spelling for field in SWITCHES]
    values, given = read(argv)
    assert values == flat(Config()) | dict.fromkeys(SWITCHES, value) and given == set(SWITCHES)
    others = [flag_of(field) + ("=false" if value else "") for field in SWITCHES]
    assert read([*others, *argv])[0] == values


def test_negated_switches() -> None:
    """The two whose names begin with `no_` have one spelling, by which they are on."""
    assert [field for field in SWITCHES if field.startswith("no_")] == ["no_save", "no_trainer"]
    negated = [field for field in SWITCHES if not field.startswith("no_")]
    assert read("--no-" + flag_of(field)[2:] for field in negated)[0] == flat(Config()) | dict.fromkeys(negated, False)
    assert any(error.startswith("--no-no-save") for error in read_args(["--no-no-save"])[1])


def test_what_a_switch_does_not_take() -> None:
    wrong = [flag_of(field) + value for field in SWITCHES for value in ("=3", "=")]
    wrong += ["--no-" + flag_of(field)[2:] + "=true" for field in SWITCHES if not field.startswith("no_")]
    errors = read_args([*wrong, "--seed", "-1"])[1]
    assert len(errors) == len(wrong) + 1
    assert all(error.startswith(flag.rstrip("=")) for flag, error in zip(wrong, errors, strict=False))
    errors = read_args([part for field in SWITCHES for part in (flag_of(field), "true")])[1]
    for field, error in zip(SWITCHES, errors, strict=True):
        assert error.startswith(f"{flag_of(field)} true: ") and f"{flag_of(field)}=true" in error


def test_flags_with_values(tmp_path: Path) -> None:
    """`--x VALUE` and `--x=VALUE`, with the value as Python has it and every choice."""
    values = {field: values_of(field, tmp_path) for field in OTHERS}
    for number in range(max(map(len, values.values()))):
        wanted = {field: each[min(number, len(each) - 1)] for field, each in values.items() if field not in ALONE}
        texts = {field: _words(value) for field, value in wanted.items()}
        found, given = read(part for field, words in texts.items() for part in (flag_of(field), *words))
        assert {field: found[field] for field in wanted} == wanted and given >= set(wanted)
        single = {field: words[0] for field, words in texts.items() if len(words) == 1}
        found, _ = read(f"{flag_of(field)}={word}" for field, word in single.items())
        assert {field: found[field] for field in single} == {field: wanted[field] for field in single}
    for field in ALONE:
        for value in values[field]:
            assert read([flag_of(field), value])[0][field] == value


def _words(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    return [str(item) for item in values]


def test_a_flag_changes_no_other_field(tmp_path: Path) -> None:
    for field in ("lr", "rollout_stop", "precision", "apply_chat_template_kwargs", "run_dir"):
        value = values_of(field, tmp_path)[0]
        assert read([flag_of(field), *_words(value)]) == (flat(Config()) | {field: value}, {field})


def test_a_flag_without_its_value() -> None:
    fields = [field for field in OTHERS if field != "offload_train"]  # slime's launch scripts have it without a value
    flags = [flag_of(field) for field in fields]
    assert read_args(flags)[1] == [f"{flag}: it needs a value" for flag in flags]


def test_help_shows_every_flag_as_it_is_taken() -> None:
    """Each line of options that help prints is a field's, with `--no-x` where the parser takes it."""
    text = build_parser().format_help()
    assert "--no-no-" not in text
    shown = {name for line in re.findall(r"^  (--\S.*?)(?:  |$)", text, re.M) for name in re.findall(r"--[\w-]+", line)}
    assert shown >= set(map(flag_of, FIELDS))
    for field in SWITCHES:
        assert ("--no-" + flag_of(field)[2:] in shown) == (not field.startswith("no_"))
    assert read_args(sorted(shown - {"--help", "--config", *map(flag_of, OTHERS)}))[1] == []
