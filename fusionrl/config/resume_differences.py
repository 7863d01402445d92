"""The flags in which a resumed run differs from its earlier part, or one run from another. Pure."""

import json
from collections.abc import Mapping

from fusionrl.base.environment import hide_passwords
from fusionrl.config.config import FIELDS, GROUP_OF, Config
from fusionrl.config.hooks import flag_of
from fusionrl.observe.formats import to_jsonable

# These say how one attempt starts and what it shows; the run is the same.
_OF_AN_ATTEMPT = {
    *("resume", "run_dir", "run_dir_mode", "name", "dry_run", "in_process", "pdb", "dashboard", "log_level"),
    *("log_samples", "save_token_values", "use_tensorboard"),
}
_ORDER = "the prompts come in another order from here on: some come twice, others not in this epoch"
_NOTES = {
    "rollout_seed": _ORDER,
    "rollout_shuffle": _ORDER,
    "seed": "the random states are the checkpoint's, in another layout they are new",
    "hf_checkpoint": "what was trained is the checkpoint's; tokenizer, reference model and the base of adapters come"
    " from the new folder",
}
_LENGTHS = {
    *("num_rollout", "num_epoch", "num_steps_per_rollout", "global_batch_size", "rollout_batch_size"),
    *("n_samples_per_prompt", "lr_decay_iters"),
}


def as_written(config: Config) -> dict[str, dict[str, object]]:
    """Return the configuration as a run's config.json has it: plain values by group, passwords hidden."""
    written: dict[str, dict[str, object]] = json.loads(hide_passwords(json.dumps(to_jsonable(config.model_dump()))))
    return written


def differences(former: Mapping[str, object], config: Config) -> dict[str, str]:
    """Return the flags whose values differ from those of `former`, a run's config.json: name → "--lr 1e-05 -> 0.001".

    Some lines say what the difference means for a resume. See `flag_differences`.
    """
    lines = flag_differences(former, as_written(config))
    return {name: f"{line} ({_NOTES[name]})" if name in _NOTES else line for name, line in lines.items()}


def flag_differences(former: Mapping[str, object], now: Mapping[str, object]) -> dict[str, str]:
    """Return the flags that differ between two runs' config.json: name → "--lr 1e-05 -> 0.001".

    Flags of one attempt alone (--log-level and the like) are left out. A flag that one of them does not know has its
    default there.
    """
    defaults = as_written(Config())
    lines: dict[str, str] = {}
    for name in FIELDS:
        group = GROUP_OF[name]
        before, after = (_section(run, group).get(name, defaults[group][name]) for run in (former, now))
        if name not in _OF_AN_ATTEMPT and before != after:
            lines[name] = f"{flag_of(name)} {_shown(before)} -> {_shown(after)}"
    passed = [_section(run, "passthrough") for run in (former, now)]
    for kind in sorted(passed[0].keys() | passed[1].keys()):
        if kind == "slime":
            continue  # they change nothing, or say what config.json says
        old, new = (_section(flags, kind) for flags in passed)
        prefix = f"--{kind}-" if kind in ("sglang", "router") else "--"
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                change = f"{_shown(old.get(name))} -> {_shown(new.get(name))}"
                flag = f"{name} of --custom-config-path" if kind == "custom" else prefix + name.replace("_", "-")
                lines[f"{kind}.{name}"] = f"{flag} {change}"
    return lines


def difference_lines(former: Mapping[str, object], config: Config, num_optimizer_steps: int | None) -> list[str]:
    """Return a line for each flag that differs, and one where a decay of the learning rate has another length now."""
    changes, train = differences(former, config), config.train
    lines = list(changes.values())
    if (
        num_optimizer_steps is not None
        and train.lr_decay_style != "constant"
        and "lr_decay_style" not in changes
        and _LENGTHS & changes.keys()
    ):
        length = train.lr_decay_iters or num_optimizer_steps
        lines.append(
            f"the {train.lr_decay_style} decay of the learning rate ends at optimizer step {length} of the run now: the"
            " next step has the rate that such a run has there"
        )
    return lines


def _section(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _shown(value: object) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
