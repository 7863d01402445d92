"""Names of other trainers are answered with the flag that they stand for, at once and without the stack."""

import re
import subprocess
import sys
import typing

import pytest

from fusionrl.config import upstream_flags as upstream
from fusionrl.config.aliases import TABLES, VALUES
from fusionrl.config.config import FIELDS, inner_type
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import read_args
from fusionrl.rewards.registry import MODEL, REMOTE, RM_TYPES

ENTRIES = [(owner, name) for owner, table in TABLES.items() for name in table]


def is_flag(flag: str) -> bool:
    """Whether a command line takes it, the parts' own flags included."""
    name = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--sglang-"):
        return "--" + flag.removeprefix("--sglang-") in upstream.sglang_parser()._option_string_actions
    megatron = {field for fields in upstream.megatron_fields().values() for field in fields}
    return name in FIELDS or name in megatron or name.removeprefix("no_") in megatron


@pytest.mark.parametrize(("owner", "name"), ENTRIES)
def test_an_entry_is_no_flag_of_ours_and_leads_to_one(owner: str, name: str) -> None:
    cure, plain = TABLES[owner][name], "--" + name.replace("_", "-")
    assert not is_flag(plain), "the table would never be asked, or hide a flag"
    named = [flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", cure) if flag != "--router-"]
    assert all(map(is_flag, named)), named
    assert named or cure.startswith("leave it out: ")
    as_typed = f"{name}=1" if "." in name else plain
    (error,) = read_args([as_typed])[1]
    assert error.startswith(as_typed) and cure in error


def choices_of(field: str) -> set[str]:
    return {*RM_TYPES, MODEL, REMOTE} if field == "rm_type" else set(typing.get_args(inner_type(FIELDS[field])))


@pytest.mark.parametrize(("field", "value"), VALUES)
def test_a_value_by_another_name(field: str, value: str) -> None:
    """The value is none that the flag takes, and what is named instead is taken."""
    assert value not in choices_of(field)
    for flag, named in re.findall(r"(--[a-z-]+) ([a-z0-9_-]+)", VALUES[field, value]):
        name = flag.removeprefix("--").replace("-", "_")
        assert name in FIELDS
        if name == "rm_type" or typing.get_origin(inner_type(FIELDS[name])) is typing.Literal:
            assert named in choices_of(name), (flag, named)
    if field != "rm_type":
        (error,) = read_args([flag_of(field), value.replace("_", "-")])[1]
        assert VALUES[field, value] in error


@pytest.mark.parametrize(
    ("argv", "messages"),
    [
        ("--learning-rate 1e-5", ["--learning-rate 1e-5: TRL's name; use --lr"]),
        ("--num_train_epochs=3", ["--num_train_epochs 3: TRL's name; use --num-epoch"]),
        ("--rollout_batch_size 8", ["8: flags are written with dashes: --rollout-batch-size"]),
        ("--no_colocate", ["--no_colocate: flags are written with dashes: --no-colocate"]),
        ("data.train_batch_size=8", ["data.train_batch_size=8: verl's name; use --rollout-batch-size"]),
        ("+actor_rollout_ref.actor.optim.lr=1e-6", ["actor.optim.lr=1e-6: verl's name; use --lr"]),
        ("trainer.balance_batch=True", ["verl's settings are not known here; `fusionrl flags` lists the flags"]),
        ("data.max_prompt_length=9 critic.optim.weight_decay=0", ["use --rollout-max-prompt-len", "not known here"]),
        ("--trainer x", ["--trainer x: verl's settings are not known here"]),
        ("--colocat", ["did you mean --colocate?"]),
        ("--precision float16", ["did you mean --precision bf16?"]),
        ("--mode rejectsampling", ["did you mean --mode reject-sampling?"]),
        ("--advantage-estimator GRPO", ["did you mean --advantage-estimator grpo?"]),
        ("--log-level verbose", ["'debug', 'info', 'warning' or 'error'"]),
    ],
)
def test_messages(argv: str, messages: list[str]) -> None:
    _, errors = read_args(argv.split())
    assert len(errors) == len(messages), errors
    for error, message in zip(errors, messages, strict=True):
        assert message in error


@pytest.mark.parametrize(
    ("setting", "cure"),
    [
        ("data.custom_cls.name", "not known here"),
        ("actor_rollout_ref.rollout.seed", "use --rollout-seed"),
        ("actor_rollout_ref.rollout.val_kwargs.seed", "not known here"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", "not known here"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.dtype", "not known here"),
        ("actor_rollout_ref.rollout.temperature", "use --rollout-temperature"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "use --pipeline-model-parallel-size"),
    ],
)
def test_a_setting_of_verls_engines_leads_to_no_flag_of_trainers(setting: str, cure: str) -> None:
    (error,) = read_args([f"{setting}=1"])[1]
    assert error.startswith(f"{setting}=1: verl's") and cure in error


def test_nobody_is_sent_to_the_opposite() -> None:
    for flag in ("--savee", "--trainers", "--sav"):
        (error,) = read_args([flag])[1]
        assert "--no-" not in error, error


def test_nothing_of_other_packages_is_printed_before_an_error() -> None:
    """Megatron-core, SGLang and the router are imported to know their flags; their warnings are not a user's."""
    wrong = ["--learning-rate", "--recompute-granularityy", "--sglang-no-such-flag", "--router-policyy", "--rm-type"]
    argv = [part for flag in wrong for part in (flag, "gsm8k")]
    command = [sys.executable, "-m", "fusionrl.cli", "plan", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines), done.stderr
    assert all(any(line.startswith(f"error: {flag}") for line in lines) for flag in wrong), done.stderr
