"""Command lines of slime's are taken: flags compared, renamed, without effect, or refused with the reason."""

import re
from pathlib import Path
from typing import Any

import pytest

from fusionrl.compat.slime.flags import (
    DEFAULTS,
    DIFFERS,
    NO_EFFECT,
    REFUSED,
    RENAMED,
    SECRETS,
    SHAPES,
    TABLE,
    Kind,
    slime_defaults,
)
from fusionrl.compat.slime.flags import PAGE as SOURCE
from fusionrl.compat.slime.translate import Form, accepted_notes, translate
from fusionrl.config import upstream_flags as upstream
from fusionrl.config.config import FIELDS
from fusionrl.config.parser import read_args

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "from-slime-flags.md"


def translated(*argv: str, **forms: Form) -> list[str]:
    """Flags of ours, in order of their names; no error. `forms`: what is in the folders that are there."""
    found = translate(argv, lambda path: forms.get(path.rstrip("/").replace("-", "_")))
    assert found.errors == []
    return found.argv


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--lora-type dora", "adapters are LoRA's alone"),
        ("--eval-max-context-len 9 --rollout-max-context-len 8", "evaluation sets have --rollout-max-context-len"),
        ("--sglang-config groups.yaml", "--engine-group NAME:num_gpus=N"),
        ("--sglang-tp-size 4 --rollout-num-gpus-per-engine 8", "use --rollout-num-gpus-per-engine"),
        ("--train-backend torchtitan", "Megatron-core trains"),
        ("--attn-implementation eager", "--attention-backend"),
        ("--opd-log-prob-top-k 16", "sampled tokens"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_refused_with_the_reason(given: str, reason: str) -> None:
    _, errors = read_args(given.split())
    assert len(errors) == 1 and reason in errors[0]


def test_each_flag_has_one_place() -> None:
    """In one table alone, and none of them is a flag of ours, which it would hide."""
    assert len(TABLE) == len(SHAPES) + len(RENAMED) + len(NO_EFFECT) + len(REFUSED)
    assert not TABLE.keys() & FIELDS.keys()
    known = {*FIELDS, "sglang_dp_size", "sglang_enable_dp_attention", "sglang_tp_size", "sglang_dtype"}
    assert DIFFERS.keys() <= known and TABLE.keys() >= SECRETS


def test_every_other_flag_of_slime_is_one_of_ours() -> None:
    """As the page says; the file lists the flags of slime that have the same name and meaning here."""
    same = set((Path(__file__).parent / "slime_same_flags.txt").read_text(encoding="utf-8").split())
    assert FIELDS.keys() >= same and not same & TABLE.keys()
    assert len(same | TABLE.keys()) > 227, "all of slime's flags have a place"


@pytest.mark.parametrize("name", TABLE)
def test_each_flag_is_taken_or_refused_by_its_name(name: str) -> None:
    """A reason names flags that there are, and no flag gets a hint to one of another meaning."""
    entry = TABLE[name]
    flag, values = "--" + name.replace("_", "-"), ["7"] * abs(entry.arity)
    config, errors = read_args([flag, *values])
    if entry.kind is Kind.REFUSED:
        (error,) = errors
        assert error == f"{' '.join([flag, *values])}: {entry.text}"
    elif entry.kind is Kind.RENAMED:
        assert all(
            error.startswith("--opd-teacher-ckpt-step")
            or "torch_dist" in error
            or name in ("fp8_format", "sglang_router_policy")
            for error in errors
        ), errors
    else:
        assert errors == []
        assert (name in config.passthrough.slime) == (name not in SECRETS)
    assert not any("did you mean" in error for error in errors)
    megatron = {field for fields in upstream.megatron_fields().values() for field in fields}
    router = upstream.option_names(upstream.router_parser(), "router")
    sglang = upstream.option_names(upstream.sglang_parser(), "sglang")
    of_train = re.sub(r"`fusionrl [^`]*`", "", entry.text)  # another command has options of its own
    for found in re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", of_train):
        field = found[2:].replace("-", "_")
        known = {field, field.removeprefix("no_")} & {*FIELDS, *TABLE, *megatron}
        assert known or found in (*router, *sglang) or found in ("--critic", "--router", "--sglang"), found


@pytest.mark.parametrize("name", [name for name, entry in REFUSED.items() if entry.neutral])
def test_a_value_that_asks_for_what_is_so_anyway(name: str) -> None:
    for value in REFUSED[name].neutral:
        config, errors = read_args(["--" + name.replace("_", "-"), value])
        assert errors == [] and config.passthrough.slime == {name: value}
        assert "what is so here anyway" in accepted_notes(config.passthrough.slime)[0]


WRITTEN = """
--bf16 → --precision bf16
--offload → --offload-train always --offload-rollout
--no-offload-train → --offload-train never
--offload-train never → --offload-train never
--decoder-last-pipeline-num-layers=3 → --num-layers-in-last-pipeline-stage 3
--no-rope-fusion → --no-apply-rope-fusion
--update-weight-transport nccl → --update-weight-transport auto
--log-probs-chunk-size -1 --log-probs-chunk-size 8 → --log-probs-chunk-size 8
--micro-batch-size 2 → --micro-batch-size 2
--micro-batch-size 2 --use-dynamic-batch-size → --use-dynamic-batch-size
--sglang-dp-size 2 → --sglang-dp-size 2
--sglang-enable-dp-attention --sglang-dp-size 2 --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1 →
--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only
    --disable-compute-advantages-and-returns --lr 1 → --mode sft --lr 1
--spec slime_plugins.models.glm4 get_glm_spec →
--spec my.module make → --custom-spec-path my.module.make
--sglang-disable-piecewise-cuda-graph → --sglang-disable-prefill-cuda-graph
--rollout-num-gpus-per-engine 8 --sglang-enable-ep-moe → --rollout-num-gpus-per-engine 8 --sglang-ep-size 8
--sglang-router-port 30000 → --router-port 30000
--train-backend fsdp --attn-implementation flash_attention_2 --fsdp-cpu-offload --lr 1 → --lr 1
--train-backend fsdp --gradient-checkpointing
    → --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--sglang-tp-size 8 --sglang-dp-size 1 --rollout-num-gpus-per-engine 8 → --rollout-num-gpus-per-engine 8
--sglang-dtype bfloat16 --lr 1 → --rollout-dtype bf16 --lr 1
--disable-rollout-global-dataset --data-source-path my.Source → --data-source-path my.Source
--disable-rollout-global-dataset --prompt-data x.jsonl
    → --data-source-path fusionrl.buffer.data_source.RolloutDataSourceWithBuffer
--eval-max-context-len 9 --rollout-max-context-len 9 → --rollout-max-context-len 9
--rollout-function-path miles.rollout.sft_rollout.generate_rollout --debug-train-only → --mode sft
"""


def cases(table: str) -> list[list[str]]:
    """[slime's flags, ours] of each line of a table; a line that begins with spaces continues the one before."""
    return [line.split("→") for line in table.replace("\n  ", " ").strip().splitlines()]


@pytest.mark.parametrize(("argv", "wanted"), cases(WRITTEN))
def test_what_is_written_otherwise(argv: str, wanted: str) -> None:
    assert sorted(translated(*argv.split())) == sorted(wanted.split())


# `NAME:KIND` is a folder that is there.
FOLDERS = """
--save run → --run-dir run
--save run --load run/ → --run-dir run --resume
--save run --load other → --run-dir run
--save run --load other other:torch_dist → --run-dir run --megatron-checkpoint other
--load other --ckpt-step 12 other:torch_dist → --megatron-checkpoint other/iter_0000012
--save old --load old --ckpt-step 1 → --run-dir old_fusionrl --megatron-checkpoint old/iter_0000001 --resume
--load other --hf-checkpoint hf other:hf → --hf-checkpoint other
--ref-load ref ref:hf → --ref-load ref
--ref-load ref ref:torch_dist → --megatron-checkpoint ref
--ref-load ref --ref-ckpt-step 3 ref:torch_dist → --megatron-checkpoint ref/iter_0000003
--ref-load ref --load other ref:torch_dist other:torch_dist → --ref-load ref --megatron-checkpoint other
--ref-load ref --megatron-checkpoint own ref:torch_dist → --ref-load ref --megatron-checkpoint own
--opd-teacher-load t --opd-teacher-ckpt-step 4 → --opd-teacher-load t/iter_0000004
"""


@pytest.mark.parametrize(("argv", "wanted"), cases(FOLDERS))
def test_folders_of_weights(argv: str, wanted: str) -> None:
    """slime starts the policy with --load where it is a checkpoint, else with --ref-load."""
    forms: dict[str, Any] = dict(word.split(":") for word in argv.split() if ":" in word)
    flags = (word for word in argv.split() if ":" not in word)
    assert sorted(translated(*flags, **forms)) == sorted(wanted.split())


def test_a_key_of_wandb_is_neither_kept_nor_shown() -> None:
    config, errors = read_args(["--use-wandb", "--wandb-key", "secret", "--wandb-project", "p"])
    assert errors == [] and "secret" not in config.model_dump_json()
    (note,) = accepted_notes(config.passthrough.slime)
    assert "--use-wandb, --wandb-project p" in note and "metrics.jsonl" in note


def test_args_of_hooks_have_them() -> None:
    config, _ = read_args(["--wandb-project", "p", "--rollout-buffer-url", "http://x", "--num-layers", "4"])
    args = config.to_args()
    assert (args.wandb_project, args.rollout_buffer_url, args.num_layers) == ("p", "http://x", 4)


def test_files_of_flags_have_them_too(tmp_path: Path) -> None:
    """A former run's config.json, and a file of a user."""
    config, _ = read_args(["--num-layers", "4", "--swiglu", "--lr", "1e-4"])
    former, file = tmp_path / "config.json", tmp_path / "run.yaml"
    former.write_text(config.model_dump_json())
    again, errors = read_args(["--config", str(former)])
    assert errors == [] and again.passthrough.slime == {"num_layers": "4", "swiglu": True}
    file.write_text("swiglu: true\nnum-layers: 4\nsave: x\noptimizer: sgd\n")
    config, errors = read_args(["--config", str(file)])
    assert config.passthrough.slime == {"swiglu": True, "num_layers": "4"}
    assert len(errors) == 2 and "--save x: slime's name; use --run-dir" in errors[0] and "Adam" in errors[1]


def test_custom_config_goes_over_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("lr: 1e-3\nuse_tis: true\nrollout_stop: [a, b]\nmine: 5\n")
    config, errors = read_args(["--lr", "1", "--custom-config-path", str(file)])
    assert errors == []
    assert (config.train.lr, config.algorithm.use_tis, config.rollout.rollout_stop) == (1e-3, True, ["a", "b"])
    assert config.to_args().mine == 5 and "lr" not in config.passthrough.custom


def test_slimes_defaults_are_written_where_they_are_not_given() -> None:
    assert slime_defaults([], ()) == [
        *("--no-calculate-per-token-loss", "--weight-decay", "0.01", "--adam-beta2", "0.999"),
        *("--lr-decay-style", "linear", "--no-rollout-skip-special-tokens", "--tool-key", "tools"),
        *("--actor-num-gpus-per-node", "8", "--max-skipped-steps", "1"),
    ]
    assert "--kl-loss-type" in slime_defaults(["--use-kl-loss"], ())
    given = ["--calculate-per-token-loss", "--weight-decay=0", "--adam-beta2", "0.9", "--lr-decay-style", "constant"]
    assert not {"--weight-decay", "--no-calculate-per-token-loss"} & {*slime_defaults(given, ())}
    for default in DEFAULTS.values():
        assert read_args(default.written.split())[1] == []


def test_the_page_is_that_of_the_tables() -> None:
    command = "python -m fusionrl.cli from-slime --flags > docs/reference/from-slime-flags.md"
    assert PAGE.read_text(encoding="utf-8") == SOURCE, f"run: {command}"
