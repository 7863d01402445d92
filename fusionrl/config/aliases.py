"""Names that other trainers give to what has another name here, and what to write instead: the tables of `aliases.md`.

A test checks that the flags that a row names exist. A name that is a flag here with another meaning is in no table.
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from fusionrl.base.wording import closest, codes, table_rows

_ROWS = list(table_rows((Path(__file__).parent / "aliases.md").read_text(encoding="utf-8")))
# Trainer ("": several) → name → what to write instead. slime's flags: `fusionrl/compat/slime/flags.md`.
TABLES = {
    owner: {name: cells[-1] for section, cells in _ROWS if section == title for name in codes(cells[0])}
    for owner, title in (("TRL", "TRL"), ("verl", "verl"), ("", "Several"))
}
# (field, value that is called otherwise elsewhere) → what to write instead.
VALUES = {
    (codes(cells[0])[0].removeprefix("--").replace("-", "_"), value): cells[-1]
    for section, cells in _ROWS
    if section == "Values"
    for value in codes(cells[1])
}
_ROLLOUT = "actor_rollout_ref.rollout."
_VERL_ROOTS = ("actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "reward_model", "trainer")
_SETTING = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=.*", re.DOTALL)


def setting_of(token: str) -> str | None:
    """The name in a setting as verl's command line has them, `a.b.c=value` or `+a.b=value`; None for anything else."""
    match = _SETTING.fullmatch(token)
    return match[1] if match else None


def cure_for(name: str, flags: Collection[str] = ()) -> str | None:
    """Say what to write for another trainer's flag (`--learning-rate`) or setting (`data.train_batch_size`).

    A verl setting that no table has is answered by its last part, if that is one of our `flags` (fields) or in a
    table; those of a critic or a reward model have flags of their own. None for names that nothing answers.
    """
    plain = name.removeprefix("--").replace("-", "_")
    root = plain.partition(".")[0]
    owner, cure = next(((owner, table[plain]) for owner, table in TABLES.items() if plain in table), ("", None))
    if cure is None and root in _VERL_ROOTS:
        owner, cure = "verl", None if root in ("critic", "reward_model") else _verl_cure(plain, flags)
        if cure is None:
            return "verl's settings are not known here; `fusionrl flags` lists the flags"
    if cure is None:
        return None
    use = cure if cure.startswith("leave it out") else f"use {cure}"
    return f"{owner}'s name; {use}" if owner else use


def _verl_cure(setting: str, flags: Collection[str]) -> str | None:
    last = setting.rpartition(".")[2]
    cure = TABLES["TRL"].get(last) or TABLES[""].get(last)
    if setting.startswith(_ROLLOUT):  # engines have flags of their own: --precision or --seed are the trainers'
        is_rollouts = cure is not None and cure.startswith("--rollout-") and setting == _ROLLOUT + last
        return cure if is_rollouts else None
    return "--" + last.replace("_", "-") if last in flags and last != "name" else cure


def value_hint(field: str, value: str, choices: Iterable[str]) -> str:
    """`; did you mean …?` for a value that `field` does not take, by meaning or by spelling; else nothing."""
    plain = value.lower().replace("-", "_")
    if (field, plain) in VALUES:
        return f"; did you mean {VALUES[field, plain]}?"
    spelled = {choice.lower().replace("-", "_"): choice for choice in choices}
    close = closest(plain, spelled)
    return f"; did you mean --{field.replace('_', '-')} {spelled[close]}?" if close else ""
