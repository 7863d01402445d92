"""Every slime flag, and Megatron-LM flag in slime's launch scripts, that fusionrl does not have, from `flags.md`. Pure.

One entry per flag. Its kind says how it is treated:

SHAPE      config.json has this value: compared, and accepted silently if equal
RENAMED    replaced by another flag (`text`), which the user could pass instead
NO_EFFECT  accepted; the plan says why it changes nothing
REFUSED    an error, with the reason and what to do instead

A flag that fusionrl has needs no entry. DIFFERS lists those whose meaning or default differs. To add a flag, add a row
to `flags.md`, and copy the page to docs/reference/from-slime-flags.md.
"""

import enum
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from fusionrl.base.wording import codes, table_rows
from fusionrl.config.aliases import cure_for
from fusionrl.config.hooks import flag_of


class Kind(enum.Enum):
    """How a flag is treated."""

    SHAPE = "compared"
    RENAMED = "renamed"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Entry(NamedTuple):
    """One flag."""

    kind: Kind
    arity: int  # number of values: 0, 1, 2, or -1 for all up to the next flag
    text: str  # for people: the flag to write, or the reason
    neutral: tuple[str, ...] = ()  # values of a refused flag that match what fusionrl does: accepted, without effect

    def accept(self, name: str, values: list[str], accepted: dict[str, object]) -> str | None:
        """Put the flag `name` into `accepted` if it is compared or has no effect; otherwise return the error."""
        flag = flag_of(name)
        if len(values) < (1 if self.arity < 0 else self.arity):
            cure = cure_for(flag)
            return f"{flag}: it needs a value" + (f"; {cure}" if cure else "")
        text = " ".join([flag, *([] if name in SECRETS else values)])
        if self.kind is Kind.RENAMED:
            return f"{text}: slime's name; use {self.text}"
        if self.kind is Kind.REFUSED and not (self.neutral and values and values[0] in self.neutral):
            return f"{text}: {self.text}"
        if self.arity == 0 and values:
            if values[0].lower() == "true":
                values = []
            elif values[0].lower() == "false":
                return None
            else:
                return f"{text}: it takes no value"
        if name not in SECRETS:
            accepted[name] = values if self.arity < 0 else (values[0] if values else True)
        return None


def name_of(word: str) -> str:
    """`--rollout-batch-size=4` → `rollout_batch_size`."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def flag_groups(argv: Sequence[str]) -> list[list[str]]:
    """Divide a command line into its flags, each with the words behind it."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def as_text(value: object) -> str:
    """Return a value as it stands on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


PAGE = Path(__file__).with_name("flags.md").read_text(encoding="utf-8")
_ARITY = {"0": 0, "1": 1, "any": -1}  # by the column of values


def names_in(cell: str) -> list[str]:
    """Return the flags in a cell by their names: `--kl-coef` → `kl_coef`."""
    return [flag.removeprefix("--").replace("-", "_") for flag in codes(cell)]


def rows_of(title: str) -> list[list[str]]:
    """Return the rows of a section of the page."""
    rows = [cells for section, cells in table_rows(PAGE) if section == title]
    assert rows, f"flags.md has no rows under {title!r}"
    return rows


def _read(title: str, kind: Kind) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for flags, values, text, *neutral in rows_of(title):
        assert values in _ARITY, f"flags.md, {flags}: values {values!r}; it is one of {', '.join(_ARITY)}"
        entry = Entry(kind, _ARITY[values], text, tuple(codes("".join(neutral))))
        entries |= dict.fromkeys(names_in(flags), entry)
    return entries


SHAPES = _read("The model's shape (`MODEL_ARGS`)", Kind.SHAPE)
RENAMED = _read("Written as another flag", Kind.RENAMED)
NO_EFFECT = _read("Accepted, without effect", Kind.NO_EFFECT)
REFUSED = _read("Not here", Kind.REFUSED)
TABLE: dict[str, Entry] = SHAPES | RENAMED | NO_EFFECT | REFUSED
SECRETS = frozenset({"wandb_key"})  # neither shown nor kept

# What fusionrl does with a flag of the same name, where slime does something else.
DIFFERS = {name: text for flag, text in rows_of("Same name, different behaviour") for name in names_in(flag)}


class Default(NamedTuple):
    """A default that differs in slime."""

    slime: str  # the default there (slime's, or Megatron-LM's)
    written: str  # fusionrl flags that give slime's value
    reason: str  # why fusionrl differs
    only_with: tuple[str, ...] = ()  # it matters only with one of these flags (or that kind of launch); empty: always


TRAIN_ASYNC = "train_async"  # a launch of train_async.py, which becomes --pipeline one-step-off
_CONDITIONS = {"mode sft": "sft", "train_async.py": TRAIN_ASYNC}
DEFAULTS = {
    name: Default(slime, "".join(codes(written)), reason, tuple(_CONDITIONS.get(n, n) for n in names_in(only_with)))
    for flag, slime, only_with, written, reason in rows_of("Defaults that differ and change training")
    for name in names_in(flag)
}


def slime_defaults(argv: Sequence[str], user_flags: Collection[str]) -> list[str]:
    """Return the fusionrl flags that add slime's defaults to a command line that leaves them out.

    Args:
        argv: a command line in fusionrl's flags.
        user_flags: names of flags that the user passed, slime's or fusionrl's; TRAIN_ASYNC for such a launch.
    """
    names = {*user_flags, *map(name_of, argv)}
    is_sft = "sft" in argv
    added: list[str] = []
    for name, default in DEFAULTS.items():
        is_due = not default.only_with or {*default.only_with} & names or ("sft" in default.only_with and is_sft)
        is_moot = is_sft and name == "rollout_skip_special_tokens"
        is_moot |= name == "max_skipped_steps" and "no_check_for_nan_in_loss_and_grad" in names
        if is_due and not is_moot and not {name, f"no_{name}"} & names:
            added += default.written.split()
    return added


# Flags that need a GPU, or that belong to the size of the real run.
_LEFT_OUT = (
    *("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer"),
    *("--optimizer-offload-fraction", "--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype"),
    *("--exp-avg-sq-dtype", "--moe-grouped-gemm", "--moe-permute-fusion", "--moe-enable-deepep"),
    *("--apply-rope-fusion", "--bias-dropout-fusion", "--bias-activation-fusion", "--cross-entropy-loss-fusion"),
    *("--gradient-accumulation-fusion", "--masked-softmax-fusion", "--persist-layer-norm", "--precision"),
    *("--transformer-impl", "--fp8-format", "--fp8-recipe", "--bf16", "--rollout-dtype", "--num-gpus-per-node"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--num-epoch", "--resume"),
    *("--num-layers-in-first-pipeline-stage", "--num-layers-in-last-pipeline-stage", "--megatron-checkpoint"),
    *("--num-layers-per-virtual-pipeline-stage", "--virtual-pipeline-model-parallel-size"),
    *("--num-steps-per-rollout", "--over-sampling-batch-size", "--rollout-max-context-len", "--save-interval"),
    *("--use-rollout-routing-replay", "--rollout-max-prompt-len", "--eval-interval", "--n-samples-per-eval-prompt"),
    *("--skip-eval-before-train", "--sglang-mem-fraction-static"),
)
_LEFT_OUT_STARTS = (
    *("--eval-", "--sglang-cuda-graph", "--sglang-speculative", "--sglang-ep", "--sglang-dp", "--sglang-moe"),
    *("--sglang-enable", "--sglang-deepep", "--sglang-attention", "--sglang-decode", "--sglang-kv"),
    *("--critic-num", "--critic-tensor", "--critic-pipeline", "--critic-context", "--critic-expert"),
)
# What stays is set anew; a flag that the command does not have is as small as can be by default.
_SIZES = (
    *("--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "4"),
    *("--rollout-max-response-len", "32", "--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1"),
    *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--no-sequence-parallel", "--no-save"),
)
_RANKS = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")


def smaller(argv: Sequence[str]) -> list[str]:
    """Return the command's flags without those that need GPUs or evaluate, at the size of one CPU process a part."""
    left_out = {*_LEFT_OUT, *(flag.replace("--no-", "--") for flag in _SIZES)}
    left_out |= {f"--{ranks}-parallel-size" for ranks in _RANKS}
    small = [
        word
        for group in flag_groups(argv)
        if group[0].replace("--no-", "--").partition("=")[0] not in left_out
        and not group[0].startswith(_LEFT_OUT_STARTS)
        for word in group
    ]
    return [*small, *_SIZES]
