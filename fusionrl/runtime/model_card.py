"""The model card (README.md) of a folder that --save-hf wrote: where the weights come from, and how to get them again.

It names no secrets, and no paths of the machine but those that the user gave.
"""

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from fusionrl.base.environment import HIDDEN, hide_secrets, is_secret
from fusionrl.base.wording import counted
from fusionrl.config.config import FIELDS, GROUPS, Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.config.hooks import flag_of
from fusionrl.config.run_parts import policy_loss_name
from fusionrl.observe.formats import write_atomically
from fusionrl.plan.plan import Plan

Row = Mapping[str, object]

CARD, BASE_CARD, CURVES = "README.md", "README.base.md", "curves.png"
_PACKAGES = ("fusionrl", "torch", "megatron-core", "sglang", "transformers", "ray")
_SHOWN = ("rollout/raw_reward", "rollout/accuracy", "rollout/response_len/mean", "train/loss", "train/entropy")
# A name of the Hugging Face hub is replaced by its folder in the cache before a run starts.
_CACHED = re.compile(r"\S*/models--([^/\s]+)--([^/\s]+)/snapshots/[^/\s]+")
_NOT_REPEATED = frozenset({"run_dir", "resume", "dry_run", "in_process", "pdb"})
_PREFIXES = {"sglang": "sglang-", "router": "router-", "transformer": "", "optimizer": "", "ddp": "", "slime": ""}


def write_model_card(folder: Path, config: Config, plan: Plan, rows: Sequence[Row], curves: Path | None) -> None:
    """Write the card and a copy of the picture `curves` into `folder`; keep the base model's card as `BASE_CARD`. The
    run may have done so before, and died."""
    card, base_card = folder / CARD, folder / BASE_CARD
    if card.exists() and not base_card.exists() and not _is_own(card, config):
        card.replace(base_card)
    if curves is not None and curves.is_file():
        shutil.copyfile(curves, folder / CURVES)
    title = folder.resolve().name if config.run.name == Config().run.name else config.run.name
    has_curves, has_base = (folder / CURVES).exists(), base_card.exists()
    text = model_card(title, config, plan, rows, has_curves=has_curves, has_base=has_base)
    write_atomically(card, text)


def _is_own(card: Path, config: Config) -> bool:
    """Return whether the card names the same command, so that this run wrote it."""
    return _repeat(config) in card.read_text(encoding="utf-8", errors="replace")


def _repeat(config: Config) -> str:
    command = " \\\n  ".join(_command(config))
    return f"```\n{command}\n```\n"


def model_card(title: str, config: Config, plan: Plan, rows: Sequence[Row], *, has_curves: bool, has_base: bool) -> str:
    """Return the card's text. `rows`: of metrics.jsonl."""
    base = _shown(config.model.hf_checkpoint)
    head = {
        "base_model": base,
        "library_name": "peft" if config.lora.lora_rank else "transformers",
        "tags": ["fusionrl", config.run.mode],
    }
    if config.run.mode == "rl":
        head["tags"] = ["fusionrl", "reinforcement-learning", config.algorithm.advantage_estimator]
    parts = [
        f"---\n{''.join(f'{name}: {json.dumps(value)}' + chr(10) for name, value in head.items())}---\n",
        f"# {title}\n",
        _summary(config, plan, rows, base),
    ]
    if has_base:
        parts.append(f"The card of the base model is [{BASE_CARD}]({BASE_CARD}).\n")
    parts += ["## Data\n", _data(config)]
    if table := _table(rows):
        parts += ["## Training\n", table]
    if has_curves:
        parts.append(f"![curves of the run]({CURVES})\n")
    if table := _evaluations(rows):
        parts += ["## Evaluation\n", table]
    parts += ["## Repeat it\n", _repeat(config), "## Versions\n", _versions()]
    return "\n".join(parts)


def _summary(config: Config, plan: Plan, rows: Sequence[Row], base: str) -> str:
    steps = max((step for row in rows if isinstance(step := row.get("step"), int)), default=0)
    how = f"--mode {config.run.mode}"
    if config.run.mode == "rl":
        algorithm = config.algorithm
        how = f"reinforcement learning ({algorithm.advantage_estimator}, {policy_loss_name(algorithm)} loss)"
    ranks = plan.layout.world_size if plan.layout is not None else 0
    kind = "GPU" if plan.device == "cuda" else "CPU process"
    text = f"`{base}` after {counted(steps, 'step')} of {how} with fusionrl, on {counted(ranks, 'trainer')}"
    return f"{text} ({kind}, {plan.precision}) and {counted(plan.num_engines, 'engine')}.\n"


def _data(config: Config) -> str:
    lines = [f"* prompts: `{_shown(path)}`" for path in config.data.prompt_data or []]
    reward = config.reward
    if config.run.mode != "sft" and (reward.custom_rm_path or reward.rm_type):
        flag = "--custom-rm-path" if reward.custom_rm_path else "--rm-type"
        lines.append(f"* reward: `{flag} {reward.custom_rm_path or reward.rm_type}`")
    if config.eval.has_sets:
        lines += [
            f"* evaluation set {eval_set.name}: `{_shown(eval_set.path)}`" for eval_set in eval_sets(config.to_args())
        ]
    return "\n".join(lines or ["No prompt data was given."]) + "\n"


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for name in _SHOWN:
        values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]  # type: ignore[arg-type]
        if values:
            lines.append(f"| {name} | {values[0]:.4g} | {values[-1]:.4g} | {max(values):.4g} |")
    return (
        "\n".join(["| metric | first step | last step | highest |", "|---|---|---|---|", *lines, ""]) if lines else ""
    )


def _evaluations(rows: Sequence[Row]) -> str:
    tested = [row for row in rows if any(name.startswith("eval/") for name in row)]
    names = sorted({name for row in tested for name in row if re.fullmatch(r"eval/[^/]+/(accuracy|reward|loss)", name)})
    if not names:
        return ""
    lines = [f"| step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in tested:
        values = [row.get(name) for name in names]
        cells = [f"{value:.4g}" if isinstance(value, int | float) else "" for value in values]
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _command(config: Config) -> list[str]:
    """Return the flags that the user gave, one a line, as the command line takes them."""
    lines = ["fusionrl train"]
    for name in config.given():
        if name not in _NOT_REPEATED:
            group = next(group for group, model in GROUPS.items() if name in model.model_fields)
            lines += _flag(flag_of(name), getattr(getattr(config, group), name))
    for kind, prefix in _PREFIXES.items():
        for name, value in getattr(config.passthrough, kind).items():
            lines += _flag(flag_of(f"{prefix}{name}"), value, may_be_secret=True)
    return lines


def _flag(flag: str, value: object, *, may_be_secret: bool = False) -> list[str]:
    """Return the flag with its value. Of our own flags none takes a secret; --label-key only sounds like one."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    values = value if isinstance(value, list | tuple) else [value]
    texts = [json.dumps(item) if isinstance(item, dict) else _shown(item) for item in values]
    hidden = may_be_secret and is_secret(flag[2:].replace("-", "_"), "")
    return [f"{flag} {HIDDEN if hidden else ' '.join(map(shlex.quote, texts))}"]


def _shown(value: object) -> str:
    """Return a value as the user gave it: a hub name instead of its cache folder, no passwords and keys."""
    return hide_secrets(_CACHED.sub(r"\1/\2", str(value)), FIELDS)


def _versions() -> str:
    lines = []
    for package in _PACKAGES:
        try:
            lines.append(f"* {package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH; no engine in this environment
            continue
    return "\n".join(lines) + "\n"
