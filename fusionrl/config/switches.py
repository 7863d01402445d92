"""Spelling of on/off flags: `--x` and `--no-x`; a field `no_x` is one flag, `--no-x`, which turns it on."""

import argparse
from collections.abc import Sequence
from typing import Any

_VALUES = {"true": True, "false": False}


def switch_spellings(field: str) -> dict[str, bool]:
    """Every spelling of the switch `field`, and the value that it gives the field.

    `colocate` → --colocate and --no-colocate; `no_save` → --no-save alone, since --save does not exist. Both also take
    their value after `=`: --colocate=false, --no-save=false.
    """
    flag = "--" + field.replace("_", "-")
    spellings = {flag: True}
    if not field.startswith("no_"):
        spellings["--no-" + flag[2:]] = False
    return spellings | {f"{flag}={text}": value for text, value in _VALUES.items()}


def spell(field: str, value: object) -> str:
    """The shortest spelling that gives a flag this value: `--lr 0.1`, `--colocate`, `--no-colocate`, `--no-save`."""
    if not isinstance(value, bool):
        return f"--{field.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
    return next(spelling for spelling, meaning in switch_spellings(field).items() if meaning == value)


class Switch(argparse.Action):
    """An option without a value: each of its spellings means on or off (see `switch_spellings`)."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None, "a switch is no positional argument"
        setattr(namespace, self.dest, switch_spellings(self.dest)[option_string])

    def format_usage(self) -> str:
        return self.shown(" | ")

    def shown(self, separator: str = ", ") -> str:
        """The spellings that help shows: those without `=`."""
        return separator.join(spelling for spelling in self.option_strings if "=" not in spelling)


def normalise_switches(argv: Sequence[str], fields: Sequence[str], errors: list[str]) -> list[str]:
    """`argv` with the values of switches in lower case (`--colocate=True` → `--colocate=true`).

    A value that a switch does not take is left out and reported in `errors`.
    """
    spelled = {spelling: field for field in fields for spelling in switch_spellings(field)}
    tokens: list[str] = []
    rest = iter([*argv, None])
    token = next(rest)
    while token is not None:
        following = next(rest)
        flag, separator, value = token.partition("=")
        field = spelled.get(flag)
        if field is None or not separator:
            tokens.append(token)
            if field is not None and following is not None and following.lower() in _VALUES:
                errors.append(f"{token} {following}: a value of a switch stands after =: {token}={following.lower()}")
                following = next(rest)
        elif f"{flag}={value.lower()}" in spelled:
            tokens.append(f"{flag}={value.lower()}")
        else:
            errors.append(f"{token}: it is switched on by {spell(field, True)} and off by {spell(field, False)}")
        token = following
    return tokens
