"""Optimizer steps: TrainGroup."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fusionrl.config.groups.base import Group


class TrainGroup(Group):
    """Training"""

    global_batch_size: int | None = Field(None, description="Samples of one optimizer step.", ge=1)
    num_steps_per_rollout: int | None = Field(
        None, description="Optimizer steps of one rollout; gives --global-batch-size, and the reverse.", ge=1
    )
    micro_batch_size: int | None = Field(
        None, description="Samples of a micro-batch. Default: as many as --max-tokens-per-gpu holds.", ge=1
    )
    max_tokens_per_gpu: int = Field(8192, description="Tokens of a micro-batch, at most.", ge=1)
    use_dynamic_batch_size: bool = Field(
        True, description="Fill micro-batches up to --max-tokens-per-gpu; always so (for launch scripts of slime)."
    )
    balance_data: bool = Field(
        True, description="Share samples out by what they cost; always so (for launch scripts of slime)."
    )
    lr: float = Field(1e-6, description="Learning rate at its peak.", ge=0)
    min_lr: float = Field(0.0, description="Learning rate at the end of its decay.", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape of the decay.")
    lr_decay_iters: int | None = Field(
        None, description="Optimizer steps over which the rate decays. Default: the whole run.", ge=1
    )
    lr_warmup_iters: int = Field(
        0,
        description="Optimizer steps of linear warm-up, from --lr-warmup-init on. The first of them has that rate, the"
        " one after them --lr.",
        ge=0,
    )
    lr_warmup_fraction: float | None = Field(
        None,
        description="The same as a share of the steps of the decay (--lr-decay-iters, or the whole run), in place of"
        " --lr-warmup-iters.",
        ge=0,
        lt=1,
    )
    lr_warmup_init: float = Field(
        0.0,
        description="Learning rate of the first optimizer step of a warm-up. At 0, Megatron's and slime's default, that"
        " step changes no weights.",
        ge=0,
    )
    weight_decay: float = Field(0.0, description="Weight decay (decoupled).", ge=0)
    adam_beta1: float = Field(0.9, description="Adam's beta 1.", ge=0, lt=1)
    adam_beta2: float = Field(0.98, description="Adam's beta 2.", ge=0, lt=1)
    adam_eps: float = Field(1e-8, description="Adam's epsilon.", gt=0)
    clip_grad: float = Field(1.0, description="Largest norm of the gradient; 0 is no clipping.", ge=0)
    max_skipped_steps: int = Field(
        5,
        description="Optimizer steps skipped in a row, for a loss or gradient that is not finite, that end the run.",
        ge=1,
    )
    custom_advantage_function_path: str | None = Field(
        None, description="Function that sets advantages (and returns) of a rank's samples in the trainers."
    )
    rollout_data_postprocess_path: str | None = Field(
        None, description="Function that sees, and may change, a rank's train data right before the first step."
    )
    custom_megatron_init_path: str | None = Field(
        None, description="Function called in each trainer when Megatron's groups are there, before the model."
    )
    custom_megatron_before_log_prob_hook_path: str | None = Field(
        None, description="Function called in each trainer before log-probs are computed."
    )
    custom_megatron_before_train_step_hook_path: str | None = Field(
        None, description="Function called in each trainer before an optimizer step."
    )
    share_prompts: bool = Field(
        True,
        description="Compute the prompt of samples in one micro-batch once, where this leaves out a quarter of the"
        " tokens, and the layers' attention can: without Transformer Engine, context parallelism and latent attention."
        " Gradients are the same.",
    )
    log_probs_chunk_size: int | None = Field(
        None,
        description="Logits made at a time: as many as so many tokens have. Without it about 32 MiB.",
        ge=1,
    )
