"""`fusionrl show`: the samples of a step in a terminal, and the table of --log-samples.

A rollout's file may have gigabytes: it is read once, sample by sample, for the few numbers by which samples are chosen,
and then only the chosen ones are read again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size

from fusionrl.base.wording import counted
from fusionrl.observe.advice import Glimpse
from fusionrl.observe.formats import as_text, shorten, visible
from fusionrl.observe.rollouts import (
    EVAL_KIND,
    FAILED_KINDS,
    RolloutFile,
    images_of_row,
    list_rollouts,
    picture_file,
    rollout_of_step,
)
from fusionrl.observe.run_dir import holds_run, last_config

_EQUAL = 1e-8  # rewards closer than this are equal, as in the metric rollout/zero_std_groups
_LISTED, _ALONE = 600, 20_000  # characters of a text in a list of samples, and of one sample

BOLD, CYAN = "1", "36"  # SGR codes of the terminal's own colours
Paint = Callable[[str, str], str]  # (text, SGR code) -> text

_HELP = """Show samples of a run: prompt, answer, label, reward, and what the trainers found out about each (advantage;
mismatch: mean |engine - trainer| log-prob of its tokens). A run that is still going may be looked at."""


def main(argv: Sequence[str]) -> int:
    """`fusionrl show [RUN] …`; returns the exit code."""
    sys.stdout.writelines(_shown(_parser().parse_args(argv)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fusionrl show", description=_HELP)
    parser.add_argument("run", metavar="RUN", nargs="?", help="run folder; default: the newest one under runs/")
    parser.add_argument("--step", type=int, help="default: the last step that has samples")
    parser.add_argument("--eval", metavar="NAME", help="samples of the evaluation set NAME")
    parser.add_argument("--failed", action="store_true", help="samples at which a function of yours raised")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="lowest rewards first")
    order.add_argument("--best", action="store_true", help="highest rewards first")
    parser.add_argument("--all-equal", action="store_true", help="only groups of equal rewards, one sample of each")
    parser.add_argument("--sample", type=int, metavar="I", help="one sample, by its index, and its group")
    parser.add_argument("-n", type=int, default=5, metavar="N", help="number of samples, 0: all; default 5")
    chars = f"characters of a text that are shown, 0: all; default {_LISTED}, with --sample {_ALONE}"
    parser.add_argument("--chars", type=int, metavar="N", help=chars)
    parser.add_argument("--json", action="store_true", help="one JSON object a sample, nothing cut")
    return parser


def _shown(options: argparse.Namespace) -> Iterator[str]:
    """Return the text to print, part by part; all mistakes are found before the first part."""
    for flag, value in (("-n", options.n), ("--chars", options.chars or 0)):
        if value < 0:
            raise ValueError(f"{flag} {value} must be 0 or more")
    run = find_run(options.run)
    file = _choose_file(run, options.step, options.eval, options.failed)
    samples = Samples(file, reward_key(run, file))
    if options.sample is not None:
        chosen = entries = samples.with_index(options.sample)
    else:
        entries = samples.ordered(options.worst, options.best, options.all_equal)
        chosen = entries[: options.n or None]
    if options.json:
        return (json.dumps(samples.record(entry)) + "\n" for entry in chosen)
    return _page(run, samples, chosen, len(entries), options)


def _page(
    run: Path, samples: Samples, chosen: list[Entry], num_matching: int, options: argparse.Namespace
) -> Iterator[str]:
    default = _LISTED if options.sample is None else _ALONE
    limit = default if options.chars is None else options.chars
    yield samples.header(run, options.all_equal) + "\n"
    for entry in chosen:
        yield "\n" + sample_block(samples.record(entry), limit, painter(sys.stdout)) + "\n"
    if options.sample is not None:
        if group := samples.describe_group(chosen[0]):
            yield f"\n{group}\n"
    elif len(chosen) < num_matching:
        yield f"\n{len(chosen)} of {num_matching}: -n 0 shows all; --sample I shows one in full, with its group\n"


def find_run(name: str | None) -> Path:
    """The run folder that was named (also by its name under runs/ alone); None: the newest one under runs/.

    A folder of runs, as the quickstart makes one, stands for its newest run; stderr names the others.

    Raises:
        ValueError: there is none; says what there is.
    """
    root = Path("runs")
    for path in (Path(name), root / name) if name is not None else ():
        if path.is_dir():
            return path if _is_run(path) or not _runs_in(path) else _newest(path)
    folders = [root, *(folder for folder in root.glob("*/") if not _is_run(folder))]  # no folder within a run
    runs = sorted((run for folder in folders for run in _runs_in(folder)), key=_last_change)
    if name is not None:
        there = f"; under {root}/ there are {', '.join(str(p.relative_to(root)) for p in runs[-10:])}" if runs else ""
        raise ValueError(f"{name} is no run folder{there}")
    if not runs:
        raise ValueError(f"there is no run under {root}/; name a run folder: fusionrl show RUN")
    return runs[-1] if runs[-1].parent == root else _newest(runs[-1].parent)


def _newest(folder: Path) -> Path:
    """Return the newest of the runs in one folder, and name all of them."""
    runs = _runs_in(folder)
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs[-10:])
        print(f"{folder} has {len(runs)} runs: {names}; the newest is taken", file=sys.stderr)
    return runs[-1]


def _is_run(path: Path) -> bool:
    return holds_run(path) or (path / "rollouts").is_dir()


def _runs_in(path: Path) -> list[Path]:
    return sorted(filter(_is_run, path.iterdir()), key=_last_change) if path.is_dir() else []


def _last_change(run: Path) -> float:
    return max(path.stat().st_mtime for path in (run, run / "rollouts", run / "metrics.jsonl") if path.exists())


def parse_steps(text: str | None) -> range | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"--steps {text}: expected a step or a range of steps, e.g. 10-20")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _choose_file(run: Path, step: int | None, eval_name: str | None, is_failed: bool) -> RolloutFile:
    kinds = {file.kind for file in list_rollouts(run)}
    sets = sorted(kind.removeprefix(EVAL_KIND) for kind in kinds - FAILED_KINDS if kind.startswith(EVAL_KIND))
    if not kinds:
        raise ValueError(f"{run} has no samples: no rollout is finished yet")
    if eval_name is not None:
        if eval_name not in sets:
            there = f"it has {', '.join(sets)}" if sets else "it has no evaluations"
            raise ValueError(f"--eval {eval_name}: {run} has no evaluation set of this name; {there}")
        return rollout_of_step(run, step, EVAL_KIND + eval_name)
    failed = sorted(kinds & FAILED_KINDS)
    if is_failed:
        if not failed:
            raise ValueError(f"--failed: {run} has no samples at which a function raised")
        return rollout_of_step(run, step, failed[-1])
    if "train" in kinds:
        return rollout_of_step(run, step)
    if len(sets) == 1:
        return rollout_of_step(run, step, EVAL_KIND + sets[0])
    if failed and not sets:
        raise ValueError(f"{run} has only samples at which a function of yours raised; --failed shows them")
    raise ValueError(f"{run} has evaluations alone; choose one with --eval: {', '.join(sets)}")


def reward_key(run: Path, file: RolloutFile) -> str | None:
    """The key of the reward that counts where rewards are dicts, as the run's files say; None: not known."""
    try:
        if file.kind.startswith(EVAL_KIND):
            summary = json.loads((run / "eval" / f"{file.step}.json").read_text(encoding="utf-8"))
            return summary["sets"][file.kind.removeprefix(EVAL_KIND)]["settings"]["reward_key"]
        config: Any = last_config(run)
        return config["reward"]["reward_key"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # a folder put together by hand; rewards that are numbers need no key


@dataclass(frozen=True)
class Entry:
    """The values by which samples are chosen; `offset` is the line's place in the file, `line` its number from 0."""

    line: int
    offset: int
    index: int | None
    group: object
    reward: float | None
    length: int
    status: str


class Samples:
    def __init__(self, file: RolloutFile, key: str | None = None) -> None:
        """Read the numbers of all samples. `key` chooses from rewards that are dicts."""
        self.file, self.key = file, key
        self.entries: list[Entry] = []
        self.num_unreadable = 0
        for line, (offset, row) in enumerate(file.scan()):
            if row is None:
                self.num_unreadable += 1
            else:
                self.entries.append(self._entry(line, offset, row))
        self.groups: dict[object, list[Entry]] = {}
        for entry in self.entries:
            self.groups.setdefault(entry.group, []).append(entry)
        self._trained = file.scan_trained()
        self.trained = {line: row for line, (_, row) in self._trained.items()}

    def _entry(self, line: int, offset: int, row: dict[str, object]) -> Entry:
        group, index, length = row.get("group_index"), row.get("index"), row.get("response_length")
        return Entry(
            line=line,
            offset=offset,
            index=index if isinstance(index, int) else None,
            group=f"line {line}" if group is None else group,  # of no group: alone
            reward=reward_number(row.get("reward"), self.key),
            length=int(length) if isinstance(length, int | float) else 0,
            status=str(row.get("status", "")),
        )

    def ordered(self, worst: bool, best: bool, all_equal: bool) -> list[Entry]:
        """The samples in this order; `all_equal`: one of each group with equal rewards. Without a reward: last."""
        entries = [group[0] for group in self._equal_groups()] if all_equal else list(self.entries)
        if worst or best:
            sign = -1.0 if best else 1.0
            entries.sort(key=lambda e: math.inf if e.reward is None else sign * e.reward)
        return entries

    def with_index(self, index: int) -> list[Entry]:
        """Return the samples with this index: several, if a generate function made them of one; ValueError if none."""
        entries = [entry for entry in self.entries if entry.index == index]
        if not entries:
            known = [entry.index for entry in self.entries if entry.index is not None]
            there = f"they have the indices {min(known)} to {max(known)}" if known else "they have no indices"
            raise ValueError(f"--sample {index}: no sample of step {self.file.step} has this index; {there}")
        return entries

    def record(self, entry: Entry) -> dict[str, Any]:
        """Collect all that is shown of a sample, as JSON can hold it; texts whole."""
        row, trained = self.file.row_at(entry.offset), self.trained.get(entry.line, {})
        reward = row.get("reward")
        mask, versions = row.get("loss_mask"), row.get("weight_versions")
        num_trained = sum(map(bool, mask)) if isinstance(mask, list) else entry.length
        return {
            "step": self.file.step,
            "attempt": self.file.attempt,
            "index": entry.index,
            "group": row.get("group_index"),
            **{name: row.get(name) for name in ("prompt", "response", "label")},
            "images": [self._image(image) for image in images_of_row(row)],
            "reward": entry.reward if entry.reward is not None else reward,
            "rewards": reward if isinstance(reward, dict) else None,
            **{name: trained.get(name) for name in ("trained_reward", "advantage", "mismatch")},
            "length": entry.length,
            "num_trained": trained.get("num_trained", num_trained),
            "status": entry.status,
            "is_removed": bool(row.get("remove_sample")),
            "weight_versions": [min(versions), max(versions)] if isinstance(versions, list) and versions else None,
            "metadata": row.get("metadata") or {},
        }

    def _image(self, image: Mapping[str, object]) -> dict[str, object]:
        """Return the size of an image and the file of its small picture, where there is one."""
        file = picture_file(self.file.path.parent, str(image["key"]))
        size = {name: image.get(name) for name in ("width", "height")}
        return size | {"file": str(file) if file.exists() else None}

    def trained_row(self, entry: Entry) -> dict[str, object]:
        """Return what the trainers wrote of a sample, values of its tokens included; {} where they wrote nothing."""
        return self.file.trained_at(self._trained[entry.line][0]) if entry.line in self._trained else {}

    def _equal_groups(self) -> list[list[Entry]]:
        return [group for group in self.groups.values() if is_equal(group)]

    def header(self, run: Path, all_equal: bool) -> str:
        """Describe the step's samples in two lines."""
        kind, attempt = self.file.kind, f", attempt {self.file.attempt}" if self.file.attempt > 1 else ""
        evaluation = f"evaluation {kind.removeprefix(EVAL_KIND)} at " if kind.startswith(EVAL_KIND) else ""
        lines = [f"{run}: {evaluation}step {self.file.step}{attempt} ({self.file.path.relative_to(run)})"]
        rewards = [entry.reward for entry in self.entries if entry.reward is not None]
        parts = [f"{counted(len(self.entries), 'sample')} in {counted(len(self.groups), 'group')}"]
        if rewards:
            mean = sum(rewards) / len(rewards)
            parts.append(f"mean reward {mean:.4g} ({min(rewards):.4g} to {max(rewards):.4g})")
            parts.append(f"groups with equal rewards: {len(self._equal_groups())}")
        if self.entries:
            parts.append(f"tokens of an answer: {sum(e.length for e in self.entries) / len(self.entries):.1f}")
        for status in ("truncated", "aborted", "failed"):
            if count := sum(entry.status == status for entry in self.entries):
                parts.append(f"{status}: {count}")
        lines.append("; ".join(parts))
        if self.num_unreadable:
            lines.append(f"lines of the file that cannot be read, and are left out: {self.num_unreadable}")
        if all_equal and not self._equal_groups():
            lines.append("no group has equal rewards")
        return "\n".join(lines)

    def describe_group(self, entry: Entry) -> str:
        """The rewards of a sample's siblings; "" for a sample of no group."""
        siblings = self.groups[entry.group]
        if len(siblings) < 2:
            return ""
        rewards = ", ".join(f"{sibling.index}: {_number(sibling.reward)}" for sibling in siblings[:64])
        more = f" and {len(siblings) - 64} more" if len(siblings) > 64 else ""
        equal = " (all equal)" if is_equal(siblings) else ""
        return f"group {entry.group}, sample: reward{equal}\n  {rewards}{more}"


def is_equal(group: Sequence[Entry]) -> bool:
    """Return whether all rewards of a group are equal, which the group then teaches nothing."""
    rewards = [entry.reward for entry in group if entry.reward is not None]
    return bool(rewards) and max(rewards) - min(rewards) < _EQUAL


def reward_number(reward: object, key: str | None) -> float | None:
    """A sample's reward as one number: of a dict that under `key`, or its only one; None where there is none."""
    if isinstance(reward, dict):
        only = next(iter(reward.values())) if len(reward) == 1 else None
        reward = only if key is None else reward.get(key, only)
    return float(reward) if isinstance(reward, bool | int | float) else None


def sample_block(record: Mapping[str, Any], limit: int, paint: Paint) -> str:
    """One sample, a line of numbers and its texts."""
    parts = [f"sample {record['index']}", f"group {record['group']}", f"reward {_number(record['reward'])}"]
    for name, form in (("advantage", "+.4g"), ("mismatch", ".2g")):
        if record[name] is not None:
            parts.append(f"{name} {record[name]:{form}}")
    trained = f", {record['num_trained']} trained on" if record["num_trained"] != record["length"] else ""
    parts += [f"{record['length']} tokens{trained}", record["status"]]
    if record["is_removed"]:
        parts.append("removed")
    if versions := record["weight_versions"]:
        parts.append("weights " + " to ".join(map(str, dict.fromkeys(versions))))
    images = [f"{image['width']} x {image['height']}  {image['file'] or ''}".strip() for image in record["images"]]
    rewards, label, metadata = record["rewards"], record["label"], record["metadata"]
    fields = [] if rewards is None else [("rewards", json.dumps(rewards, ensure_ascii=False), limit)]
    fields += [("prompt", as_text(record["prompt"]), limit), *(("image", image, limit) for image in images)]
    fields += [("answer", as_text(record["response"]), limit)]
    fields += [] if label is None else [("label", as_text(label), limit)]
    fields += [("metadata", json.dumps(metadata, ensure_ascii=False), min(limit, _LISTED))] if metadata else []
    lines = [paint(visible("  ".join(parts)), BOLD)]
    for name, text, most in fields:
        first, *rest = visible(shorten(text, most), keep_lines=True).split("\n")
        lines += [f"  {paint(f'{name:<9}', CYAN)}{first}", *(f"  {' ' * 9}{line}" for line in rest)]
    return "\n".join(lines)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ("none" if value is None else json.dumps(value))


def may_color(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that may have colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painter(stream: TextIO) -> Paint:
    """Colours a text by an SGR code where `stream` is a terminal that may have colours."""
    if may_color(stream):
        return lambda text, style: f"\x1b[{style}m{text}\x1b[0m"
    return lambda text, style: text


def sample_table(glimpses: Sequence[Glimpse], step: int, width: int) -> str:
    """Return a line for each sample, none wider than `width` columns, for the console of a run.

    Of an answer and a prompt the end is shown, where the result and the question mostly are.
    """
    rows = [["sample", "reward", "tokens", "label", "answer (end)", "prompt (end)"]]
    for glimpse in glimpses:
        cut = "+" if glimpse.status == "truncated" else "" if glimpse.status == "completed" else "!"
        label = visible(glimpse.label or "")
        label = label if cell_len(label) <= 16 else set_cell_size(label, 15) + "…"
        numbers = [str(glimpse.index), f"{glimpse.reward:.4g}", f"{glimpse.response_length}{cut}"]
        rows.append([*numbers, label, visible(glimpse.response), visible(glimpse.prompt)])
    *widths, answer_width, prompt_width = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    room = max(width - 2 - sum(widths) - 2 * 5, 20)
    answer_width = min(answer_width, max(room * 3 // 5, room - prompt_width))
    lines = [f"step {step}: {counted(len(glimpses), 'sample')} (+: cut off, !: failed or aborted)"]
    for row in rows:
        texts = [set_cell_size(row[3], widths[3]), set_cell_size(_end(row[4], answer_width), answer_width)]
        numbers = [text.rjust(column) for text, column in zip(row[:3], widths, strict=False)]
        lines.append("  " + "  ".join([*numbers, *texts, _end(row[5], room - answer_width)]).rstrip())
    return "\n".join(lines)


def _end(text: str, width: int) -> str:
    """The end of `text`, in at most `width` columns."""
    return text if cell_len(text) <= width else "…" + set_cell_size(text[::-1], width - 1)[::-1]
