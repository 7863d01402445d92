"""The result of a check of `fusionrl doctor`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fusionrl.base.wording import counted

Status = Literal["fact", "warning", "fault"]
_MARKS: dict[Status, str] = {"fact": "  ok  ", "warning": " warn ", "fault": "FAULT "}
_NO_CURE = "change the flag that the line names; `fusionrl train --help` has each"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str  # name of the check
    status: Status  # fact: nothing to do; warning: a run may suffer; fault: a run fails, or learns nothing
    fact: str  # a sentence with the value that was read
    cure: str = ""  # the thing to do; "" for a fact

    def __post_init__(self) -> None:
        assert (self.status == "fact") == (not self.cure), "a warning and a fault have a cure, a fact has none"

    def line(self) -> str:
        """Return it as text: the cure stands below the fact."""
        text = f"{_MARKS[self.status]} {self.check:<10} {self.fact}"
        return f"{text}\n{'':18}cure: {self.cure}" if self.cure else text


def fact(check: str, text: str) -> Finding:
    return Finding(check, "fact", text)


def warning(check: str, text: str, cure: str) -> Finding:
    return Finding(check, "warning", text, cure)


def fault(check: str, text: str, cure: str) -> Finding:
    return Finding(check, "fault", text, cure)


def of_messages(check: str, status: Literal["warning", "fault"], messages: Iterable[str]) -> list[Finding]:
    """Make findings of other checks' messages, which have the cure behind their last semicolon."""
    findings = []
    for message in messages:
        text, _, cure = message.rpartition("; ")
        findings.append(Finding(check, status, text or message, cure if text else _NO_CURE))
    return findings


def has_fault(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "fault" for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line of the report."""
    parts = [counted(len(findings), "check")]
    for status in ("fault", "warning"):
        number = sum(finding.status == status for finding in findings)
        parts.append(counted(number, status) if number else f"no {status}s")
    return ", ".join(parts)
