"""slime's defaults that differ from ours and change training, and a launch at the size of a laptop. Pure."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fusionrl.base.wording import codes
from fusionrl.compat.slime.flags.table import names_in, rows_of
from fusionrl.compat.slime.flags.translate import flag_groups, name_of


class Default(NamedTuple):
    """A default that differs in slime.

    slime    the default there (slime's, or Megatron-LM's)
    written  fusionrl flags that give slime's value
    reason   why fusionrl differs
    only_with  the default matters only with one of these flags (or that kind of launch); empty: always
    """

    slime: str
    written: str
    reason: str
    only_with: tuple[str, ...] = ()


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
