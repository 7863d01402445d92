"""Optimizer steps: TrainGroup."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fusionrl.config.groups.base import Group


class TrainGroup(Group):
    """Training"""

    global_batch_size: int | None = Field(None, description="Samples of one optimizer step.", ge=1)
    num_steps_per_rollout: int | None = Field(
        None, description="Optimizer steps of one rollout; determines --global-batch-size, and the reverse.", ge=1
    )
    micro_batch_size: int | None = Field(
        None, description="Samples of a micro-batch. Default: as many as --max-tokens-per-gpu holds.", ge=1
    )
    max_tokens_per_gpu: int = Field(8192, description="Maximum tokens of a micro-batch.", ge=1)
    use_dynamic_batch_size: bool = Field(
        True,
        description="Fill micro-batches up to --max-tokens-per-gpu; always on (accepted for slime's launch scripts).",
    )
    balance_data: bool = Field(
        True, description="Balance samples over ranks by cost; always on (accepted for slime's launch scripts)."
    )
    lr: float = Field(1e-6, description="Peak learning rate.", ge=0)
    min_lr: float = Field(0.0, description="Learning rate at the end of the decay.", ge=0)
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
        description="Warm-up as a share of the decay steps (--lr-decay-iters, or the whole run), instead of"
        " --lr-warmup-iters.",
        ge=0,
        lt=1,
    )
    lr_warmup_init: float = Field(
        0.0,
        description="Learning rate of the first warm-up step. At 0, the default of Megatron-LM and slime, that step"
        " changes no weights.",
        ge=0,
    )
    weight_decay: float = Field(0.0, description="Weight decay (decoupled).", ge=0)
    adam_beta1: float = Field(0.9, description="Adam's beta 1.", ge=0, lt=1)
    adam_beta2: float = Field(0.98, description="Adam's beta 2.", ge=0, lt=1)
    adam_eps: float = Field(1e-8, description="Adam's epsilon.", gt=0)
    clip_grad: float = Field(1.0, description="Clip the gradient to this norm; 0 disables clipping.", ge=0)
    max_skipped_steps: int = Field(
        5,
        description="End the run after this many skipped steps in a row; a step is skipped if its loss or gradient is"
        " not finite.",
        ge=1,
    )
    custom_advantage_function_path: str | None = Field(
        None, description="Function that sets advantages (and returns) of a rank's samples in the trainers."
    )
    rollout_data_postprocess_path: str | None = Field(
        None, description="Function that may change a rank's train data right before the first step."
    )
    custom_megatron_init_path: str | None = Field(
        None,
        description="Function called in each trainer after Megatron's process groups exist, before the model is built.",
    )
    custom_megatron_before_log_prob_hook_path: str | None = Field(
        None, description="Function called in each trainer before log-probs are computed."
    )
    custom_megatron_before_train_step_hook_path: str | None = Field(
        None, description="Function called in each trainer before an optimizer step."
    )
    share_prompts: bool = Field(
        True,
        description="Compute a prompt that several samples of a micro-batch share only once, if this saves a quarter of"
        " the tokens and the attention supports it (no Transformer Engine, context parallelism or latent attention)."
        " Gradients are the same.",
    )
    log_probs_chunk_size: int | None = Field(
        None,
        description="Tokens whose logits are computed at a time. Default: as many as fit 32 MiB.",
        ge=1,
    )
