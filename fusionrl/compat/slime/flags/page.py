"""docs/reference/from-slime-flags.md, generated from the tables: `fusionrl from-slime --flags`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusionrl.compat.slime.flags.defaults import DEFAULTS, TRAIN_ASYNC
from fusionrl.compat.slime.flags.same_flags import SAME
from fusionrl.compat.slime.flags.table import DIFFERS, NO_EFFECT, REFUSED, RENAMED, SHAPES, Entry
from fusionrl.config.hooks import flag_of

_HEAD = """# slime's flags

Made by `fusionrl from-slime --flags`; a test holds it against the code. For users of slime who bring their launch
scripts.

```
fusionrl from-slime run-qwen3-4B.sh    # print the command that does the same, and comments on what differs
fusionrl from-slime --shim shim                # make shim/train.py and shim/train_async.py
python shim/train.py ${MODEL_ARGS[@]} …        # slime's arguments, and slime's defaults
```

The script is read, never run. Variables, arrays, sourced model files, conditions, loops, functions, `read`,
here-documents, `bash -c "…"`, other scripts that it runs, and `ray job submit` are read. What only the machine of the
run knows (`$(nvidia-smi …)`, a variable of the environment) stays in the command as the script has it, and is named;
words that may stand for several flags come last. `--set NAME=VALUE` gives such a variable a value. A script is read as
if it were run without arguments (`--set 1=VALUE` is its first).

A launcher in Python (`execute_train(train_args=…)`, `os.system("… train.py …")`) is read in the same way: f-strings,
functions, dataclasses, conditions, and modules of the checkout around it. `--set FIELD=VALUE` sets a parameter of its
`main`. Files that a script or a launcher writes from its own text are written by the printed script.

The files of `--sglang-config` and `--megatron-config-path` become the flags that do the same, where the script writes
them or they lie in its folder. An array whose content depends on a condition that cannot be known is marked `NOT HERE`:
`--set` gives the variables of that condition.

A flag that neither slime nor fusionrl has, of a fork or of your own parser, goes into a YAML file that the printed
script writes and `--custom-config-path` reads: functions find it in `args`. A comment names these flags.

`fusionrl train` takes slime's flags as well, with fusionrl's defaults. The flags of `--sglang-*` and `--router-*` are
those of SGLang and its router in both, and the fields of Megatron-core's classes (`--recompute-granularity`, …) keep
their names. `--custom-config-path` may override flags, as there. A launch of `train_async.py` gets `--pipeline
one-step-off`, which generates one rollout ahead; where a flag does not go with it, the comments say why.
"""


def render_page() -> str:
    """Return the whole page as Markdown."""
    parts = [_HEAD, "\n## Defaults that differ and change training\n\n"]
    parts.append("`from-slime` and the shim write slime's value where a script leaves the flag out.\n\n")
    parts.append("| flag | slime's default | for slime's here | why it is another here |\n|---|---|---|---|\n")
    for name, default in DEFAULTS.items():
        written = f"`{' '.join(default.written)}`" if default.written else ""
        beside = f" (with {' or '.join(map(_beside, default.beside))})" if default.beside else ""
        parts.append(f"| `{flag_of(name)}` | {default.slime}{beside} | {written} | {_cell(default.reason)} |\n")
    parts.append("\n## The same name, and something differs\n\n| flag | here |\n|---|---|\n")
    parts += [f"| `{flag_of(name)}` | {_cell(text)} |\n" for name, text in DIFFERS.items()]
    parts += _table("Written as another flag", "becomes", RENAMED)
    parts += _table("Not here", "reason, and what to do", REFUSED)
    parts.append("\nWith these values they are taken, as they ask for what is so anyway: ")
    neutral = (f"`{flag_of(name)} {value}`" for name, entry in REFUSED.items() for value in entry.neutral)
    parts.append(", ".join(neutral) + ".\n")
    parts += _table("Accepted, without effect", "why; the plan says so, too", NO_EFFECT)
    parts.append(
        "\n## The model's shape (`MODEL_ARGS`)\n\nAll of it is read from the config.json of `--hf-checkpoint`. A flag"
    )
    parts.append(
        " that says the same is taken in silence; one that says something else is an error with both values.\n"
    )
    parts += _rows("config.json", SHAPES)
    parts.append("\n## The same\n\n")
    parts.append(_names(sorted(SAME - DIFFERS.keys() - DEFAULTS.keys())) + "\n")
    return "".join(parts)


def _table(title: str, column: str, entries: Mapping[str, Entry]) -> list[str]:
    return [f"\n## {title}\n", *_rows(column, entries)]


def _rows(column: str, entries: Mapping[str, Entry]) -> list[str]:
    """Flags with the same text share a row."""
    rows: dict[str, list[str]] = {}
    for name, entry in entries.items():
        rows.setdefault(entry.text, []).append(name)
    return [
        f"\n| flag | {column} |\n|---|---|\n",
        *(f"| {_names(names)} | {_cell(text)} |\n" for text, names in rows.items()),
    ]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{flag_of(name)}`" for name in names)


def _beside(name: str) -> str:
    return {"sft": "`--mode sft`", TRAIN_ASYNC: "`train_async.py`"}.get(name, f"`{flag_of(name)}`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
