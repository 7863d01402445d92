"""Flags without a field in fusionrl: passed through to SGLang, the router and Megatron-core, or refused with a cure."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fusionrl.base.wording import closest
from fusionrl.config import upstream_flags as upstream
from fusionrl.config.aliases import cure_for, setting_of
from fusionrl.config.config import PassThrough
from fusionrl.config.fields import FIELDS
from fusionrl.config.hooks import flag_of
from fusionrl.config.slime_flags import slime_entry


def parse_extras(
    extras: Sequence[str], errors: list[str], of_slime: Mapping[str, object] = MappingProxyType({})
) -> PassThrough:
    """Return what the tokens `extras` pass through; a message for each that no part takes goes to `errors`.

    of_slime  slime flags that were accepted already
    """
    parsed = empty_passthrough()
    parsed["slime"].update(of_slime)
    for flag, values in _group_extras(extras):
        if error := parse_extra(flag, values, parsed):
            errors.append(error)
    return PassThrough(**parsed)


def empty_passthrough() -> dict[str, dict[str, object]]:
    """Return a mapping of each kind of `PassThrough` to no values."""
    return {kind: {} for kind in PassThrough.model_fields}


def parse_extra(flag: str, values: list[str], parsed: dict[str, dict[str, object]]) -> str | None:
    """Put the value of one flag without a field into `parsed`, by kind; return the error if no part takes it."""
    field = flag[2:].replace("-", "_")
    text = " ".join([flag, *values])
    try:
        if flag.startswith("--") and (entry := slime_entry(field)) is not None:
            return entry.accept(field, values, parsed["slime"])
        if (cure := _cure(flag)) is not None:
            return f"{text}: {cure}"
        if not flag.startswith("--"):
            return f"{flag}: unexpected argument (flags begin with --)"
        part, option = upstream.split_flag(flag)
        if part:
            parser, owned = upstream.PARTS[part]
            parsed[part].update(upstream.parse_with(parser(), option, values, owned))
        else:
            for kind, value in upstream.parse_megatron(field, values).items():
                parsed[kind][field.removeprefix("no_") if value is False else field] = value
    except upstream.UpstreamError as error:
        return f"{text}: {error}{_did_you_mean(flag)}"
    except KeyError:
        return f"{flag}: unknown flag{_did_you_mean(flag)}"
    return None


def _group_extras(extras: Sequence[str]) -> list[tuple[str, list[str]]]:
    grouped: list[tuple[str, list[str]]] = []
    for token in extras:
        if token.startswith("--") and len(token) > 2:
            flag, separator, value = token.partition("=")
            grouped.append((flag, [value] if separator else []))
        elif setting_of(token) is not None:
            grouped.append((token, []))
        elif grouped:
            grouped[-1][1].append(token)
        else:
            grouped.append((token, []))
    return grouped


def _cure(flag: str) -> str | None:
    """Say what to write for a flag with underscores, or for another trainer's; None for any other flag."""
    plain = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and (plain in FIELDS or plain.removeprefix("no_") in FIELDS):
        return f"flags are written with dashes: --{plain.replace('_', '-')}"
    return cure_for(setting_of(flag) or flag, FIELDS)


def _did_you_mean(flag: str) -> str:
    if part := upstream.split_flag(flag)[0]:
        names = upstream.option_names(upstream.PARTS[part][0](), part)
    else:
        fields = [*FIELDS, *(field for fields in upstream.megatron_fields().values() for field in fields)]
        names = [flag_of(field) for field in fields]
    # Whoever writes --trainer does not mean --no-trainer.
    names = [name for name in names if name.startswith("--no-") == flag.startswith("--no-")]
    # Without the dashes, which would make all short names alike.
    close = closest(flag.removeprefix("--"), [name.removeprefix("--") for name in names], cutoff=0.7)
    return f"; did you mean --{close}?" if close and f"--{close}" != flag else ""
