"""slime's defaults that differ from ours and change training, and what to write for slime's. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fusionrl.compat.slime.flags.translate import name_of


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
DEFAULTS: dict[str, Default] = {
    "calculate_per_token_loss": Default(
        "off",
        "--no-calculate-per-token-loss",
        "a mean over samples weighs a token of a short answer more; runs and results documented here have the mean over"
        " tokens",
    ),
    "kl_loss_type": Default(
        "k1",
        "--kl-loss-type k1",
        "as a loss, k1 has a gradient of mean 0: it does not hold the policy near the reference",
        ("use_kl_loss",),
    ),
    "weight_decay": Default(
        "0.01", "--weight-decay 0.01", "the runs documented here have none; launch scripts give 0.1"
    ),
    "adam_beta2": Default(
        "0.999", "--adam-beta2 0.999", "launch scripts give 0.98, and so do the runs documented here"
    ),
    "lr_decay_style": Default(
        "linear", "--lr-decay-style linear", "launch scripts give constant; a run of unknown length cannot decay"
    ),
    "rollout_skip_special_tokens": Default(
        "off",
        "--no-rollout-skip-special-tokens",
        "a grader should not see <|im_end|>; tokens and log-probs are the same",
    ),
    "tool_key": Default("tools", "--tool-key tools", "a column of that name may hold something else"),
    "loss_mask_type": Default(
        "qwen",
        "--loss-mask-type qwen",
        "auto finds the kind by the chat template, and refuses one that it does not know",
        ("sft",),
    ),
    "use_tis": Default(
        "off",
        "--no-use-tis",
        "--pipeline one-step-off trains tokens of older weights, and has --use-tis on unless the loss is chosen",
        (TRAIN_ASYNC,),
    ),
    "actor_num_gpus_per_node": Default(
        "8", "--actor-num-gpus-per-node 8", "a first run is one on a laptop or on one GPU"
    ),
    "use_dynamic_batch_size": Default(
        "off", "", "micro-batches are filled by tokens always; it changes speed, not the loss"
    ),
    "max_tokens_per_gpu": Default("none", "", "the same"),
    "micro_batch_size": Default("1", "", "the same"),
    "balance_data": Default("off", "", "samples are always shared out by their cost; it changes speed, not the loss"),
    "save": Default(
        "none: nothing is saved",
        "",
        "without --save a run saves its last step in runs/<name>-<time>; --no-save saves nothing",
    ),
    "max_skipped_steps": Default(
        "a loss that is not finite ends the run", "--max-skipped-steps 1", "one odd step does not end a long run"
    ),
    "custom_tis_function_path": Default(
        "read only with --use-tis or --get-mismatch-metrics",
        "",
        "a function that is given is called; leave it out to switch it off",
    ),
    "ref_load": Default(
        "the policy starts with it",
        "",
        "a folder of the reference model is that of the reference alone, unless it is torch_dist",
    ),
    "data_source_path": Default("…RolloutDataSourceWithBuffer", "", "the class here has the buffer, too"),
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
