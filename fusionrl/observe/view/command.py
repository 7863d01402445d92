"""`fusionrl view`: flags, and what is printed."""

import argparse
import codecs
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fusionrl.observe.formats import visible, write_atomically
from fusionrl.observe.rollouts import EVAL_KIND, rollout_of_step
from fusionrl.observe.show import Samples, find_run, may_color, painter, parse_steps, reward_key, sample_block
from fusionrl.observe.view.page import FRAME, Pages, page_parts, serve_pages
from fusionrl.observe.view.run_block import NoRoomError, Vocabulary, build_run, vocabulary_of
from fusionrl.observe.view.step_block import Number, page_row

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
    tokenizer = "folder with a tokenizer.json; default: --hf-checkpoint of the run"
    parser.add_argument("--tokenizer", metavar="FOLDER", help=tokenizer)
    serve = "show the page from this machine until Ctrl-C: the newest state, and all samples; default: a free port"
    parser.add_argument("--serve", metavar="PORT", nargs="?", type=int, const=0, help=serve)
    terminal = parser.add_argument_group("one sample in the terminal")
    terminal.add_argument("--step", type=int, metavar="N", help="default: the last step that has samples")
    terminal.add_argument("--sample", type=int, metavar="I", help="its index; default: the first")
    terminal.add_argument("--eval", metavar="NAME", help="of the evaluation set NAME")
    by = "colours; default: mismatch, or mask where no engine sampled"
    terminal.add_argument("--by", choices=list(COLUMNS), help=by)
    return parser


def _check_mode(options: argparse.Namespace) -> bool:
    """Return whether the user selects one sample; raise ValueError for a flag that its mode does not have."""
    names = ("html", "steps", "mb", "serve", "step", "sample", "eval", "by")
    is_set = {name for name in names if getattr(options, name) is not None}
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


# Name of --by → the column of a sample's row, and its meaning.
COLUMNS = {
    "mask": ("mask", "loss mask: tokens that are not trained on are grey, or between [- and -] without colours"),
    "mismatch": ("gap", "log-prob of the trainer less that of the engine, nats"),
    "entropy": ("entropy", "entropy of the trainer's distribution, nats"),
    "advantage": ("advantage", "advantage"),
    "logprob": ("engine", "log-prob of the engine, nats"),
    "version": ("version", "version of the weights that sampled the token"),
}
# Background colours of the 256 of a terminal, weak to strong, that leave black and white text readable.
_BELOW, _ABOVE = (52, 88, 124, 160), (22, 28, 34, 40)
_KINDS = (24, 58, 54, 94, 23, 89)
_GREY = "38;5;245"
_WORST = 10
_LEAST_MISMATCH = 0.01  # nats of the full colour at least, or the largest rounding of a healthy run would have it


def token_texts(tokens: Sequence[int], vocabulary: Vocabulary | None) -> list[str]:
    """The text that each token adds: a character of several tokens comes with the last one, an unknown token as its
    id."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for token in tokens:
        piece = vocabulary.bytes_of(token) if vocabulary is not None else None
        texts.append(decoder.decode(b"", True) + f"[{token}]" if piece is None else decoder.decode(piece))
        if piece is None:
            decoder.reset()
    rest = decoder.decode(b"", True)
    return [*texts[:-1], texts[-1] + rest] if texts else []


def column_of(row: Mapping[str, object], name: str) -> list[Number]:
    """A column of a sample's row, a value a token; None for each where the run has none."""
    tokens, value = row.get("tokens"), row.get(name, 1 if name == "mask" else None)
    if isinstance(value, list):
        return value
    return [value if isinstance(value, int | float) else None] * (len(tokens) if isinstance(tokens, list) else 0)


def render_tokens(row: Mapping[str, object], by: str, vocabulary: Vocabulary | None, has_color: bool) -> Iterator[str]:
    """Lines of a sample's response: its tokens, coloured by a name of `COLUMNS`, then those with the largest values."""
    tokens = row.get("tokens")
    if not isinstance(tokens, list):
        yield "this sample has no token ids"
        return
    name, meaning = COLUMNS[by]
    values = column_of(row, name)
    texts = [visible(text, keep_lines=True) for text in token_texts(tokens, vocabulary)]
    yield f"{len(tokens)} tokens by {by}: {meaning}"
    length = row.get("num_tokens")
    if isinstance(length, int) and length > len(tokens):
        yield f"these are the first {len(tokens):,} of {length:,} tokens; the rest is cut"
    if all(value is None for value in values):
        is_of_trainers = by in ("mismatch", "entropy", "advantage")
        source = "trainers write it with --save-token-values" if is_of_trainers else "the rollout has none"
        yield f"no token has a value: {source}"
    styles = _styles(values, by)
    mask = column_of(row, "mask")
    parts = []
    for text, style, trained in zip(texts, styles, mask, strict=True):
        codes = ";".join(code for code in (style, "" if trained else _GREY) if code)
        parts.append(f"\x1b[{codes}m{text}\x1b[0m" if has_color and codes else text)
    if by == "mask" and not has_color:
        runs = itertools.groupby(zip(texts, mask, strict=True), key=lambda pair: bool(pair[1]))
        joined = ((trained, "".join(text for text, _ in run)) for trained, run in runs)
        parts = [text if trained else f"[-{text}-]" for trained, text in joined]
    yield "".join(parts)
    if by != "mask":
        yield from _table(row, texts, values)


def _styles(values: Sequence[Number], by: str) -> list[str]:
    known = [value for value in values if value is not None]
    if by == "mask":
        return [""] * len(values)
    if by == "version":
        kinds = {value: _KINDS[i % len(_KINDS)] for i, value in enumerate(sorted(set(known)))}
        return ["" if value is None else f"48;5;{kinds[value]}" for value in values]
    largest = max((abs(value) for value in known), default=0.0)
    if by == "mismatch":
        largest = max(largest, _LEAST_MISMATCH)
    return [_shade(value, largest) for value in values]


def _shade(value: Number, largest: float) -> str:
    if value is None or not largest or abs(value) < 0.1 * largest:
        return ""
    colors = _ABOVE if value > 0 else _BELOW
    return f"48;5;{colors[min(int(len(colors) * abs(value) / largest), len(colors) - 1)]}"


def _table(row: Mapping[str, object], texts: Sequence[str], values: Sequence[Number]) -> Iterator[str]:
    """The tokens with the largest values, and all that is known of each."""
    places = [i for i, value in enumerate(values) if value is not None]
    places = sorted(places, key=lambda i: -abs(values[i] or 0.0))[:_WORST]
    if not places:
        return
    names = ("engine", "gap", "entropy", "advantage", "version", "mask")
    columns = {name: column_of(row, name) for name in names}
    columns_shown = [name for name in names if any(columns[name][i] is not None for i in places)]
    lines = [["token", *columns_shown, "text"]]
    for i in places:
        numbers = [columns[name][i] for name in columns_shown]
        lines.append([str(i), *("" if value is None else f"{value:.4g}" for value in numbers), repr(texts[i])])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns_shown) + 1)]
    for line in lines:
        yield "  " + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=False)) + f"  {line[-1]}"
