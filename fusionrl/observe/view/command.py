"""`fusionrl view`: flags, and what is printed."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from fusionrl.observe.json_values import write_atomically
from fusionrl.observe.rollouts import EVAL_KIND, rollout_of_step
from fusionrl.observe.show import (
    Samples,
    find_run,
    may_color,
    painter,
    parse_steps,
    reward_key,
    sample_block,
)
from fusionrl.observe.view.page import FRAME, Pages, page_parts, serve_pages
from fusionrl.observe.view.run_block import NoRoomError, build_run, vocabulary_of
from fusionrl.observe.view.step_block import page_row
from fusionrl.observe.view.terminal import COLUMNS, render_tokens

PAGE_FILE = "view.html"
_MB, _MEGABYTE = 20, 1_000_000
_CHARS = 20_000  # of a prompt in the terminal

_HELP = """Write a run as one HTML file that opens without a network: curves, steps, groups, and samples with tokens
coloured by mask, mismatch, entropy, advantage or weight version. Two runs stand side by side. With --step, --sample or
--eval, print one sample in the terminal instead. A run that is still going may be looked at."""


def main(argv: Sequence[str]) -> int:
    """`fusionrl view [RUN …] …`; returns the exit code."""
    options = _parser().parse_args(argv)
    if _check_mode(options):
        _print_sample(options)
    elif options.serve is not None:
        _serve(options)
    else:
        print(_write_html(options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fusionrl view", description=_HELP)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run folders; default: the newest one under runs/")
    parser.add_argument("--html", metavar="FILE", help=f"the file to write; default: {PAGE_FILE} in the run's folder")
    parser.add_argument("--steps", metavar="A-B", help="samples of these steps only; default: of all, as room allows")
    parser.add_argument("--mb", type=float, metavar="N", help=f"most megabytes of the file; default {_MB}")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="folder with a tokenizer.json; default: --hf-checkpoint of the run"
    )
    parser.add_argument(
        "--serve",
        metavar="PORT",
        nargs="?",
        type=int,
        const=0,
        help="show the page from this machine until Ctrl-C: always the newest state, and all samples; default: a free"
        " port",
    )
    terminal = parser.add_argument_group("one sample in the terminal")
    terminal.add_argument("--step", type=int, metavar="N", help="default: the last step that has samples")
    terminal.add_argument("--sample", type=int, metavar="I", help="its index; default: the first")
    terminal.add_argument("--eval", metavar="NAME", help="of the evaluation set NAME")
    terminal.add_argument(
        "--by", choices=list(COLUMNS), help="colours; default: mismatch, or mask where no engine sampled"
    )
    return parser


def _check_mode(options: argparse.Namespace) -> bool:
    """Return whether the user selects one sample; raise ValueError for a flag that its mode does not have."""
    is_set = {
        name
        for name in ("html", "steps", "mb", "serve", "step", "sample", "eval", "by")
        if getattr(options, name) is not None
    }
    terminal = is_set & {"step", "sample", "eval"}
    if terminal:
        unused, mode = is_set & {"html", "steps", "mb", "serve"}, f"--{min(terminal)}, which prints one sample"
    elif "serve" in is_set:
        unused, mode = is_set & {"html", "steps", "mb", "by"}, "--serve, which shows all of the run"
    else:
        unused, mode = is_set & {"by"}, "a page; give --step, --sample or --eval for one sample in the terminal"
    if unused:
        raise ValueError(f"--{' and --'.join(sorted(unused))} cannot be used with {mode}")
    return bool(terminal)


def _write_html(options: argparse.Namespace) -> str:
    runs = [find_run(name) for name in options.runs or [None]]
    megabytes = _MB if options.mb is None else options.mb
    if not math.isfinite(megabytes):
        raise ValueError(f"--mb {megabytes}: expected a number of megabytes")
    room = int(megabytes * _MEGABYTE) - FRAME
    if room <= 0:
        raise ValueError(f"--mb {megabytes}: the page takes {FRAME / _MEGABYTE:.1f} MB without a sample; give it more")
    blocks = []
    for number, run in enumerate(runs):
        share = room // (len(runs) - number)
        try:
            block = build_run(run, number, share, parse_steps(options.steps), options.tokenizer or "")
        except NoRoomError as error:
            least = math.ceil((FRAME + error.needed * len(runs)) / _MEGABYTE * 10 + 1) / 10
            raise ValueError(f"--mb {megabytes}: {error}; give at least --mb {least}") from error
        room -= block.size()
        blocks.append(block)
    path = Path(options.html) if options.html else runs[0] / PAGE_FILE
    try:
        write_atomically(path, (part.encode() for part in page_parts(blocks)))
        size = path.stat().st_size
        assert size <= megabytes * _MEGABYTE, "the frame of the page is larger than FRAME, or a block than its share"
    except OSError as error:
        raise ValueError(f"--html {path} cannot be written ({error.strerror}); name another file") from error
    lines = [f"{path}: {size / _MEGABYTE:.1f} MB, opens in any browser without a network"]
    for run, block in zip(runs, blocks, strict=True):
        files = [file for file in block.facts["files"] if "samples" in file]
        num_kept, total = (sum(file[name] for file in files) for name in ("kept", "samples"))
        lines.append(f"{run}: {num_kept:,} of {total:,} samples with texts and tokens")
        lines += [f"  left out: {reason}" for reason in block.facts["left_out"]]
    return "\n".join(lines)


def _serve(options: argparse.Namespace) -> None:
    pages = Pages([find_run(name) for name in options.runs or [None]], options.tokenizer or "")
    pages.index()  # a run that cannot be read fails here, not in the browser
    server, address = serve_pages(pages, options.serve)
    print(f"{address}\nCtrl-C ends it", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _print_sample(options: argparse.Namespace) -> None:
    if len(options.runs) > 1:
        raise ValueError(f"--step, --sample and --eval show one run; {len(options.runs)} were named")
    run = find_run(options.runs[0] if options.runs else None)
    kind = "train" if options.eval is None else EVAL_KIND + options.eval
    file = rollout_of_step(run, options.step, kind)
    samples = Samples(file, reward_key(run, file))
    if not samples.entries:
        raise ValueError(f"{file.path} has no sample that can be read")
    chosen = samples.entries[:1] if options.sample is None else samples.with_index(options.sample)
    vocabulary = vocabulary_of(run, options.tokenizer or "")
    for entry in chosen:
        row = page_row(file.row_at(entry.offset), samples.trained_row(entry), entry.length)
        record = samples.record(entry)
        record["response"] = "token by token below"
        parts = [samples.header(run, False), "\n\n", sample_block(record, _CHARS, painter(sys.stdout)), "\n\n"]
        by = options.by or ("mismatch" if "engine" in row else "mask")
        lines = render_tokens(row, by, vocabulary, may_color(sys.stdout))
        sys.stdout.writelines([*parts, *(line + "\n" for line in lines)])
