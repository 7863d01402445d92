"""Every flag of the parser in every spelling: the field gets the value that the help promises, and no other changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import GROUPS, Config
from fusionrl.config.fields import FIELDS, switches
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import build_parser, read_args
from fusionrl.config.presets import with_preset
from tests.config.flag_values import values_of

SWITCHES = switches()
OTHERS = [field for field in FIELDS if field not in SWITCHES]


def flat(config: Config) -> dict[str, Any]:
    return {name: value for group in GROUPS for name, value in vars(getattr(config, group)).items()}


def changed(*argv: str) -> dict[str, Any]:
    """The fields that the command line changed, of which nothing was wrong; and which it says it gave."""
    config, errors = read_args(argv)
    assert errors == []
    plain = flat(Config())
    return {name: value for name, value in flat(config).items() if value != plain[name]}


def given(*argv: str) -> set[str]:
    config, _ = read_args(argv)
    return {name for group in GROUPS for name in getattr(config, group).model_fields_set}


@pytest.mark.parametrize("field", SWITCHES)
def test_a_switch(field: str) -> None:
    """`--x` and `--x=true` are on, `--no-x` and `--x=false` off; of several the last one counts."""
    flag, default = flag_of(field), FIELDS[field].default
    spellings = {flag: True, f"{flag}=true": True, f"{flag}=True": True, f"{flag}=false": False, f"{flag}=FALSE": False}
    if not field.startswith("no_"):
        spellings["--no-" + flag[2:]] = False
    for spelling, value in spellings.items():
        assert changed(spelling) == ({} if value == default else {field: value}), spelling
        assert given(spelling) == {field}
    on, off = flag, f"{flag}=false"
    assert (changed(on, off), changed(off, on)) == (changed(off), changed(on))
    for wrong in (f"{flag}=3", f"{flag}=", *([f"--no-{flag[2:]}=true"] if f"--no-{flag[2:]}" in spellings else [])):
        _, errors = read_args([wrong, "--seed", "-1"])
        assert len(errors) == 2 and errors[0].startswith(wrong.rstrip("=")), errors
    _, errors = read_args([flag, "true"])
    assert errors == [f"{flag} true: a value of a switch stands after =: {flag}=true"]


def test_the_two_flags_that_are_named_by_what_they_turn_off() -> None:
    assert [field for field in SWITCHES if field.startswith("no_")] == ["no_save", "no_trainer"]
    assert read_args(["--no-save"])[0].checkpoint.no_save and read_args(["--no-save"])[0].to_args().no_save
    assert read_args(["--no-trainer"])[0].reject_sampling.no_trainer
    assert any(error.startswith("--no-no-save") for error in read_args(["--no-no-save"])[1])


def _texts(value: Any) -> list[str]:
    """The value as a command line has it."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


@pytest.mark.parametrize("field", OTHERS)
def test_a_flag_with_a_value(field: str, tmp_path: Path) -> None:
    """`--x VALUE` and `--x=VALUE`; without a value it is a mistake."""
    flag, plain = flag_of(field), flat(Config())
    for value in values_of(field, tmp_path):
        texts = _texts(value)
        preset = with_preset({field: value}) if field == "algorithm" else {field: value}
        if field == "pipeline" and value != "on-policy":  # its loss corrects by default
            preset["use_tis"] = True
        if field == "engine_group":  # the devices follow from it
            preset["rollout_num_gpus"] = 3
        wanted = {name: set_to for name, set_to in preset.items() if set_to != plain[name]}
        assert changed(flag, *texts) == wanted
        assert field in given(flag, *texts)
        if len(texts) == 1:
            assert changed(f"{flag}={texts[0]}") == wanted
    _, errors = read_args([flag])
    alone = field == "offload_train"  # slime's launch scripts have it without a value
    assert errors == ([] if alone else [f"{flag}: it needs a value"])


def test_help_shows_every_flag_as_it_is_taken() -> None:
    """Each line of options that help prints is a field's, with `--no-x` where the parser takes it."""
    text = build_parser().format_help()
    assert "--no-no-" not in text
    shown = {name for line in re.findall(r"^  (--\S.*?)(?:  |$)", text, re.M) for name in re.findall(r"--[\w-]+", line)}
    for field in FIELDS:
        assert flag_of(field) in shown
    for field in SWITCHES:
        assert ("--no-" + flag_of(field)[2:] in shown) == (not field.startswith("no_"))
    for name in shown - {"--help", "--config", *map(flag_of, OTHERS)}:
        _, errors = read_args([name])
        assert errors == [], name
