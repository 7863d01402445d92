"""Optimizer steps: TrainGroup."""

from typing import Literal

from fusionrl.config import scopes
from fusionrl.config.groups.base import Group, acting, always, of_policy, of_trainers, of_training

of_decay = acting(scopes.TRAINS, scopes.DECAY)


class TrainGroup(Group):
    """Training"""

    global_batch_size: int | None = of_training(None, "Samples of one optimizer step.", ge=1)
    num_steps_per_rollout: int | None = of_training(
        None, "Optimizer steps of one rollout; determines --global-batch-size, and the reverse.", ge=1
    )
    micro_batch_size: int | None = of_trainers(
        None, "Samples of a micro-batch. Default: as many as --max-tokens-per-gpu holds.", ge=1
    )
    max_tokens_per_gpu: int = of_trainers(8192, "Maximum tokens of a micro-batch.", ge=1)
    max_patches_per_gpu: int | None = acting(scopes.TRAINERS, scopes.HAS_IMAGES)(
        None, "Maximum patches of the different images of a micro-batch; a sample with more is alone.", ge=1
    )
    use_dynamic_batch_size: bool = always(
        True, "Fill micro-batches up to --max-tokens-per-gpu; always on (accepted for slime's launch scripts)."
    )
    balance_data: bool = always(True, "Balance samples over ranks by cost; always on (accepted for slime's scripts).")
    lr: float = of_training(1e-6, "Peak learning rate.", ge=0)
    min_lr: float = of_decay(0.0, "Learning rate at the end of the decay.", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = of_training("constant", "Shape of the decay.")
    lr_decay_iters: int | None = of_decay(None, "Optimizer steps of the decay. Default: the whole run.", ge=1)
    lr_warmup_iters: int = of_training(
        0, "Optimizer steps of linear warm-up; the first has --lr-warmup-init, the one after the last --lr.", ge=0
    )
    lr_warmup_fraction: float | None = of_training(
        None, "Warm-up as a share of --lr-decay-iters (or of the run), instead of --lr-warmup-iters.", ge=0, lt=1
    )
    lr_warmup_init: float = acting(scopes.TRAINS, scopes.WARM_UP)(
        0.0, "Learning rate of the first warm-up step. At 0, as in Megatron-LM and slime, it changes no weights.", ge=0
    )
    weight_decay: float = of_training(0.0, "Weight decay (decoupled).", ge=0)
    adam_beta1: float = of_training(0.9, "Adam's beta 1.", ge=0, lt=1)
    adam_beta2: float = of_training(0.98, "Adam's beta 2.", ge=0, lt=1)
    adam_eps: float = of_training(1e-8, "Adam's epsilon.", gt=0)
    clip_grad: float = of_training(1.0, "Clip the gradient to this norm; 0 disables clipping.", ge=0)
    max_skipped_steps: int = of_training(
        5, "End the run after this many skipped steps in a row, whose loss or gradient is not finite.", ge=1
    )
    enable_mtp_training: bool = of_training(
        False,
        "Train the checkpoint's layers of multi-token prediction, with which engines speculate, by the cross-entropy of"
        " the trained tokens. No gradient of it reaches the rest of the model.",
    )
    mtp_num_layers: int | None = acting(scopes.TRAINS, scopes.FURTHER)(
        None, "With --enable-mtp-training: how many of these layers, the first ones. Default: 1.", ge=1
    )
    mtp_loss_scaling_factor: float = acting(scopes.TRAINS, scopes.FURTHER)(
        0.2, "With --enable-mtp-training: what their loss counts.", ge=0
    )
    custom_advantage_function_path: str | None = of_policy(
        None, "Function that sets advantages (and returns) of a rank's samples in the trainers."
    )
    rollout_data_postprocess_path: str | None = of_policy(
        None, "Function that may change a rank's train data right before the first step."
    )
    custom_megatron_init_path: str | None = of_trainers(
        None, "Function called in each trainer after Megatron's process groups exist, before the model is built."
    )
    custom_megatron_before_log_prob_hook_path: str | None = of_policy(None, "Called in each trainer before log-probs.")
    custom_megatron_before_train_step_hook_path: str | None = of_training(None, "Called in each trainer before a step.")
    share_prompts: bool = of_trainers(
        True,
        "Compute a prompt that several samples of a micro-batch share only once, if this saves a quarter of"
        " the tokens and the attention supports it (no Transformer Engine, context parallelism, latent attention or"
        " delta nets). Gradients are the same.",
    )
    freeze_params_name_list: list[str] = of_training(
        [],
        "Regular expressions: a parameter whose Megatron or Hugging Face name has a match is not trained, and pushed"
        " once.",
    )
    only_train_params_name_list: list[str] = of_training([], "The same of parameters that alone are trained.")
    freeze_vision: bool = acting(scopes.TRAINS, scopes.HAS_IMAGES)(False, "Do not train the vision tower.")
    vision_recompute: bool = acting(scopes.TRAINS, scopes.HAS_IMAGES)(
        True, "Compute each block of the vision tower again in backward, which keeps its input alone."
    )
    log_probs_chunk_size: int | None = of_trainers(
        None, "Tokens whose logits are computed at a time. Default: as many as fit 32 MiB.", ge=1
    )
