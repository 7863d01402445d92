"""Flags that were given and do nothing are named with the reason; those that act are not."""

import itertools
import typing
from pathlib import Path

import pytest

from fusionrl.algorithms.estimators import PRESETS
from fusionrl.checks.validate import effect_errors, effect_warnings
from fusionrl.config.algorithm import AlgorithmGroup
from fusionrl.config.config import GROUP_OF, Config, PassThrough, inner_type
from fusionrl.config.hooks import SIGNATURES, flag_of
from fusionrl.config.parser import read_args
from fusionrl.config.run_parts import policy_loss_name

HOOK_FLAGS = set(map(flag_of, SIGNATURES))
SFT = "in --mode sft, where"


def lines_of(*argv: str) -> list[str]:
    config, errors = read_args(argv)
    assert errors == []
    return effect_warnings(config)


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        ("--use-kl-loss", []),
        ("--in-process --stall-warn-s 9 --numa-affinity", ["with --in-process: --stall-warn-s, --num"]),
        ("--mode sft --lr 1e-3 --input-key messages --loss-mask-type chatml", []),
        ("--mode sft --use-kl-loss --eps-clip 0.1", [f"{SFT} it has no policy loss: --eps-clip, --use-kl-loss"]),
        ("--mode sft --rollout-data-postprocess-path a.b", [f"not called {SFT} it has no policy loss: --rollout"]),
        ("--mode sft --apply-chat-template", ["conversations always go through the chat template"]),
        ("--mode sft --algorithm ppo", [f"{SFT} no policy is trained by rewards: --algorithm"]),
        ("--mode sft --rollout-sample-filter-path a.b", []),
        ("--mode sft --eval-prompt-data v v.jsonl --eval-interval 5 --eval-input-key m", []),
        ("--mode sft --eval-prompt-data v v.jsonl --eval-top-k 5", ["engines evaluate nothing: --eval-"]),
        ("--mode eval --eval-prompt-data v v.jsonl --eval-top-k 5 --rollout-stop x", []),
        ("--mode eval --rollout-function-path a.b --rollout-sample-hook-path a.b", []),
        ("--mode eval --lr 1 --save-interval 1", ["no weights are trained: --lr", "nothing is saved: --save"]),
        ("--mode reject-sampling --eval-interval 1", ["nothing is evaluated between steps: --eval-interval"]),
        ("--mode reject-sampling --tensor-model-parallel-size 2", []),
        ("--mode reject-sampling --no-trainer --tensor-model-parallel-size 2", ["where it has no trainers: --tensor"]),
        ("--mode reject-sampling --algorithm grpo", ["no policy is trained by rewards: --algorithm"]),
        ("--debug-rollout-only --lr 1 --rm-type math", ["--mode rl --debug-rollout-only, where no weights"]),
        ("--debug-train-only --rollout-stop x --algorithm ppo", ["--debug-train-only, where it has no engines"]),
        ("--loss-type sft_loss --use-tis", ["--mode rl --loss-type sft_loss, where it has no policy loss: --use-tis"]),
        ("--reject-sampling-threshold 0.5", ["no samples are chosen and written: --reject-sampling-threshold"]),
        ("--no-save --save-interval 3 --async-save", ["no effect with --no-save: --save-interval, --async-save"]),
        ("--min-lr 1e-6 --lr-decay-style cosine", []),
        ("--mtp-num-layers 1", ["no effect without --enable-mtp-training: --mtp-num-layers"]),
        ("--lr-warmup-init 1e-7", ["no effect without --lr-warmup-iters: --lr-warmup-init"]),
        ("--kl-loss-type k2", ["no effect without --use-kl-loss: --kl-loss-type"]),
        ("--ref-load x", ["(no reference model): --ref-load"]),
        ("--kl-coef-type k2 --advantage-estimator ppo", ["no effect without --kl-coef: --kl-coef-type"]),
        ("--gamma 1 --lambd 1", ["plus, ppo or prime: --gamma", "without --advantage-estimator ppo: --lambd"]),
        ("--pass-k 1", ["no effect without --advantage-estimator pass_at_k: --pass-k"]),
        ("--critic-lr 1e-5 --value-clip 0.2", ["without --advantage-estimator ppo: --critic-lr, --value-clip"]),
        ("--tis-clip 2 --tis-level token", ["no effect without --use-tis: --tis-clip, --tis-level"]),
        ("--loss-length 9", ["no effect without --loss-aggregation constant: --loss-length"]),
        ("--use-opd --opd-type megatron --opd-teacher-num-gpus 2", ["with --opd-type megatron: --opd-teacher-num-gp"]),
        ("--overlong-penalty-factor 1", ["no effect without --overlong-buffer-len: --overlong-penalty-factor"]),
        ("--accuracy-lower-bound 0.2", ["check_accuracy_in_range: --accuracy-lower-bound"]),
        ("--colocate --offload-rollout --device cpu", ["no effect with --device cpu: --offload-rollout"]),
        ("--engine-num-threads 2 --device cuda", ["no effect with --device cuda: --engine-num-threads"]),
        ("--mask-offpolicy-in-partial-rollout", ["no effect without --partial-rollout: --mask-offpolicy"]),
        ("--tools-path a.b", ["not called without --custom-generate-function-path: --tools-path"]),
        ("--clip-cov-low 1 --kl-cov-coef 1", ["-loss clip_cov: --clip-cov-low", "-loss kl_cov: --kl-cov-coef"]),
        ("--policy-loss dpo --ref-load x", []),
        ("--eps-clip 0.1", ["with one optimizer step a rollout (its ratio to the policy that sampled is 1): --eps-"]),
        ("--eps-clip 0.1 --num-steps-per-rollout 2", []),
        ("--eps-clip 0.1 --policy-loss gpg", ["no effect without --policy-loss ppo or gspo"]),
        ("--loss-aggregation constant --calculate-per-token-loss", ["--loss-aggregation or --policy-loss dpo: --calc"]),
        ("--advantage-estimator rloo --disable-grpo-std-normalization", ["--disable-grpo-std-normalization"]),
        ("--advantage-estimator ppo --disable-rewards-normalization", ["--disable-rewards-normalization"]),
        ("--max-turns 3 --custom-generate-function-path fusionrl.rollout.agent.generate", []),
        ("--eval-prompt-data v v.jsonl --skip-eval-before-train", ["without --eval-interval: --eval-prompt-data"]),
        ("--num-rollout 3 --num-epoch 1", ["no effect with --num-rollout: --num-epoch"]),
        ("--mode sft --rollout-function-path a.b --rollout-max-prompt-len 9", []),
        ("--mode sft --sglang-mem-fraction-static 0.5", ["it has no engines: --sglang-mem-fraction-static"]),
        ("--mode eval --recompute-granularity full", ["it has no trainers: --recompute-granularity"]),
    ],
)
def test_lines(argv: str, lines: list[str]) -> None:
    found = lines_of(*argv.split())
    assert len(found) == len(lines), found
    for line in lines:
        assert any(line in one for one in found), (line, found)


@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        ("--kl-loss-coef 0.1", "--use-kl-loss"),
        ("--tis-clip 3.5", "--use-tis"),
        ("--opd-kl-coef 0.5", "--use-opd"),
        ("--kl-coef-type k2", "--advantage-estimator reinforce_plus_plus or ppo"),
        ("--mode sft --dpo-beta 0.2", "--policy-loss dpo"),
        ("--kl-coef 0.1", "--advantage-estimator reinforce_plus_plus or ppo"),
        ("--keep-best eval/a/accuracy", "--keep-checkpoints"),
        ("--group-rm", "--custom-rm-path"),
        ("--pdb", "--in-process"),
        ("--rollout-health-check-interval 5.0", "--use-fault-tolerance"),
        ("--update-weight-mode delta", "--update-weight-transport disk"),
    ],
)
def test_a_value_that_needs_another_flag_is_refused(argv: str, missing: str) -> None:
    """In any mode, where it is not the default; a user's function may read it."""
    (error,) = effect_errors(read_args(argv.split())[0])
    assert error.startswith(f"{argv.removeprefix('--mode sft ')} has no effect without {missing}; add that")
    assert effect_errors(read_args(["--kl-loss-type", "k2", "--tis-clip", "2"])[0]) == []
    assert effect_errors(read_args(["--tis-clip", "3", "--custom-tis-function-path", "a.b"])[0]) == []


@pytest.mark.parametrize(
    "argv", ["--profile-steps 3 4 --mode eval", "--save-hf out --mode eval", "--use-opd --mode sft", "--no-trainer"]
)
def test_a_value_that_only_other_modes_take_is_refused(argv: str) -> None:
    (error,) = effect_errors(read_args(argv.split())[0])
    flag, _, mode = argv.partition(" --mode ")
    assert error.startswith(f"{flag} has no effect in --mode {mode or 'rl'}, where ")
    assert error.endswith("; leave it out")


def test_a_preset_is_not_what_the_user_gave() -> None:
    for name in PRESETS:
        assert [line for line in lines_of("--algorithm", name) if "--algorithm" not in line] == []
        assert all(line.endswith(": --algorithm") for line in lines_of("--mode", "sft", "--algorithm", name))
    (line,) = lines_of("--mode", "sft", "--algorithm", "gspo", "--eps-clip", "0.1", "--advantage-estimator", "grpo")[1:]
    assert line.endswith("--eps-clip")


def test_what_is_written_for_any_flag_in_any_mode() -> None:
    """A flag is named once; a hook is 'not called', and has no effect nowhere."""
    for mode, debug in itertools.product(("rl", "sft", "reject-sampling", "eval"), ("", "rollout", "train")):
        run = {"mode": mode, **({f"debug_{debug}_only": True} if debug else {})}
        plain = Config.from_flat(run)
        values = {field: getattr(getattr(plain, group), field) for field, group in GROUP_OF.items()}
        lines = effect_warnings(Config.from_flat(values))
        assert lines and all(line.startswith(("not called", "no effect")) for line in lines)
        named = [(flag, line[:10] == "not called") for line in lines for flag in line.rpartition(": ")[2].split(", ")]
        assert len(dict(named)) == len(named)
        assert all(is_hook == (flag in HOOK_FLAGS) for flag, is_hook in named)


def test_passed_through_to_several_classes_is_named_once() -> None:
    passed = PassThrough(transformer={"tp_comm_overlap": True}, ddp={"overlap_grad_reduce": True}, optimizer={"lr2": 1})
    found = effect_warnings(Config.from_flat({"mode": "eval"}, passed))
    assert [line.split(": ")[1] for line in found] == ["--tp-comm-overlap", "--lr2, --overlap-grad-reduce"]


def test_the_policy_loss_is_that_of_the_trainers() -> None:
    from fusionrl.trainer.loss import LossOptions

    fields = AlgorithmGroup.model_fields
    names = [typing.get_args(inner_type(fields[name])) for name in ("policy_loss", "advantage_estimator")]
    for loss, estimator in itertools.product(*names):
        config = Config.from_flat({"policy_loss": loss, "advantage_estimator": estimator})
        assert policy_loss_name(config.algorithm) == LossOptions.from_config(config).policy_loss


def test_the_hooks_that_whole_runs_call_are_not_claimed_to_be_silent(tmp_path: Path) -> None:
    """tests/e2e/test_modes.py runs rl with all of these and sees each called."""
    from tests.e2e.all_hooks import HOOKS

    flags = [part for field, name in HOOKS.items() for part in (flag_of(field), f"tests/e2e/all_hooks.py:{name}")]
    disk = ["--update-weight-transport", "disk", "--update-weight-mode", "delta"]
    assert lines_of("--mode", "rl", "--loss-type", "custom_loss", "--eval-prompt-data", "a", "b", *disk, *flags) == []
