"""Flags of the model, the push of its weights, its adapters, and optimizer steps."""

import re
from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from fusionrl.base.wording import BASE
from fusionrl.config import scopes
from fusionrl.config.scopes import Group, acting, always, of_engines, of_policy, of_pushes, of_trainers, of_training

of_disk_pushes = acting(scopes.PUSHES, scopes.DISK)


class ModelGroup(Group):
    """Model and precision"""

    hf_checkpoint: str | None = always(
        None, "Hugging Face folder, or name on the Hub (as for every such flag): shape, tokenizer and initial weights."
    )
    debug_random_weights: bool = of_trainers(
        False, "Start from random weights in the shape of --hf-checkpoint, for benchmarks; reads only config.json."
    )
    megatron_checkpoint: str | None = of_trainers(
        None, "Folder of a Megatron checkpoint (torch_dist) with the initial weights; the rest is --hf-checkpoint's."
    )
    custom_model_provider_path: str | None = of_trainers(
        None, "Function that builds a pipeline stage of the policy: Megatron's GPTModel, with its names."
    )
    custom_spec_path: str | None = of_trainers(
        None, "Function `spec(args, config, vp_stage)` that gives Megatron's spec of the layers, or builds a stage."
    )
    ref_load: str | None = acting(scopes.POLICY, scopes.REFERENCE)(
        None, "Folder of the reference model for KL terms, Hugging Face or torch_dist. Default: the initial weights."
    )
    precision: Literal["auto", "fp32", "bf16"] = always(
        "auto", "Precision of the trainers; auto is bf16 on GPUs and fp32 on a CPU."
    )
    rollout_dtype: Literal["auto", "fp32", "bf16"] = of_engines(
        "auto", "Precision of the engines; auto: the same as the trainers."
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = of_trainers(
        "auto", "Layer implementation; auto is Transformer Engine's where it is installed, on GPUs in bf16."
    )
    tensor_model_parallel_size: int = of_trainers(1, "Tensor parallel size of the trainers.", ge=1)
    pipeline_model_parallel_size: int = of_trainers(1, "Pipeline parallel size of the trainers.", ge=1)
    virtual_pipeline_model_parallel_size: int | None = of_trainers(
        None, "Model chunks that each pipeline rank holds (interleaved 1F1B). Default: 1.", ge=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = of_trainers(
        None, "Layers of each chunk; an alternative to --virtual-pipeline-model-parallel-size.", ge=1
    )
    context_parallel_size: int = of_trainers(1, "Context parallel size of the trainers.", ge=1)
    expert_model_parallel_size: int = of_trainers(1, "Expert parallel size of the trainers.", ge=1)
    expert_tensor_parallel_size: int | None = of_trainers(
        None, "Tensor parallel size of the experts. Default: --tensor-model-parallel-size.", ge=1
    )


class WeightsGroup(Group):
    """Weight push"""

    update_weight_mode: Literal["full", "delta"] = of_disk_pushes(
        "full", "Push all weights (full), or what changed since the last push (delta, for transport disk)."
    )
    update_weight_transport: Literal["auto", "broadcast", "ipc", "disk"] = of_pushes(
        "auto", "How weights reach engines; auto: ipc if colocated, else broadcast (docs/guides/weight-push.md)."
    )
    update_weight_disk_dir: str | None = of_disk_pushes(
        None, "Folder for transport disk, used by this run alone. Default: weights in the run's folder."
    )
    update_weight_disk_keep_files: bool = of_disk_pushes(
        False, "Keep the files of every version. Default: only the last version, until the run ends."
    )
    update_weight_local_checkpoint_dir: str | None = of_disk_pushes(
        None, "Folder of each engine host to load from; required for delta. Default: --update-weight-disk-dir."
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = acting(scopes.PUSHES, scopes.DISK, scopes.DELTA)(
        "xor", "Encoding of a delta: xor of all bits, or positions and new values."
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "sha256", "adler32"] = of_disk_pushes(
        "xxh3-128", "Checksum of pushed files, and of each tensor that a delta changes."
    )
    custom_update_weight_post_write_path: str | None = of_disk_pushes(
        None, "Function called in every trainer once a version's files are written (docs/reference/hooks.md)."
    )
    update_weight_buffer_size: int = of_pushes(512 * 1024**2, "Maximum bytes in one bucket of a weight push.", ge=1024)
    pause_generation_mode: Literal["abort", "retract", "in_place"] = of_engines(
        "abort", "How a weight push treats running requests; in_place turns the prefix cache off."
    )
    verify_weights: Literal["first", "always", "never"] = of_pushes(
        "first",
        "Which pushes are verified by checksums and by log-probs; first: the first to each process of an engine.",
    )
    verify_weights_interval: int | None = acting(scopes.PUSHES, scopes.VERIFIES)(
        None, "With --verify-weights first: also verify every so many pushes.", ge=1
    )
    verify_tolerance: float | None = acting(scopes.PUSHES, scopes.VERIFIES)(
        None, "Mean |log-prob difference| a verified push may show. Default: 1e-4 in fp32, else 0.1.", gt=0
    )
    update_weight_timeout_s: float = of_pushes(600.0, "Time limit of one weight push, seconds.", gt=0)


of_adapters = acting(scopes.LORA)
of_trained_adapters = acting(scopes.TRAINS, scopes.LORA)
# Of PEFT's init_lora_weights, and of its other kinds of adapters.
_REFUSED = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga", "dora", "vera", "adalora")


class LoraGroup(Group):
    """Adapters (LoRA)"""

    lora_rank: int = always(
        0, "Rank of low-rank adapters, which are trained while the weights stay; 0: all weights are trained.", ge=0
    )
    lora_alpha: float = of_adapters(32.0, "What an adapter adds is multiplied by this number / --lora-rank.", gt=0)
    lora_use_rslora: bool = of_adapters(False, "Multiply by --lora-alpha / sqrt(--lora-rank) instead (rsLoRA).")
    lora_dropout: float = of_trained_adapters(0.0, "Dropout of an adapter's input while training.", ge=0, lt=1)
    target_modules: list[str] = of_adapters(
        ["all-linear"],
        "Modules that get an adapter, by Hugging Face's names (q_proj) or Megatron's (linear_qkv); all-linear: each"
        " linear layer of the decoder.",
    )
    exclude_modules: list[str] = of_adapters([], "Modules that get none, by the same names.")
    lora_adapter_path: str | None = of_adapters(
        None, "PEFT folder with the adapter to start from; where nothing is trained, to serve."
    )
    lora_adapters: list[str] = of_adapters(
        [],
        "Several adapters of this rank on one model, NAME or NAME=FOLDER (a PEFT folder to start from): each row of the"
        " data names its own, and each has its optimizer (docs/guides/adapters.md).",
    )
    adapter_key: str = of_adapters("adapter", "Column, or key of the metadata, that names the adapter of a row.")
    lora_init: Literal["kaiming"] = of_trained_adapters(
        "kaiming", "Initial values: A uniform as PEFT's default, B zero."
    )
    lora_push: Literal["auto", "adapter", "merged"] = acting(scopes.PUSHES, scopes.LORA)(
        "auto",
        "What engines get: the adapter under a name of its version, without a pause, or weights with the adapter added"
        " to them; auto: adapter where the engines can (docs/guides/adapters.md).",
    )

    @field_validator("lora_adapters")
    @classmethod
    def _check_names(cls, specs: list[str]) -> list[str]:
        names = [spec.partition("=")[0] for spec in specs]
        for spec, name in zip(specs, names, strict=True):
            if not re.fullmatch(r"\w[\w-]*", name, re.ASCII) or name == BASE or spec.endswith("="):
                raise ValueError(
                    f"{spec}: write NAME or NAME=FOLDER; a name has letters, digits, '_' and '-', and is not {BASE}"
                )
        if doubles := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two adapters have the name {min(doubles)}; rename one")
        return specs

    @field_validator("target_modules", "exclude_modules", mode="before")
    @classmethod
    def _without_commas(cls, value: object) -> object:
        """Take names with commas between them, as other trainers write them."""
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list):
            return value
        return [name for word in words for part in str(word).split(",") if (name := part.strip())]

    @field_validator("lora_init", mode="before")
    @classmethod
    def _is_known(cls, value: object) -> object:
        if str(value).lower() in _REFUSED:
            reason = "only LoRA with zeros in B leaves the model, which engines share, as it is; give kaiming"
            raise PydanticCustomError("lora_init", reason)
        return value


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
    check_weight_hash_across_dp_replicas_interval: int | None = of_training(
        None,
        "Every so many optimizer steps, and before each checkpoint, compare the weights of data-parallel replicas; a"
        " rank that has others is named and ends the run, and nothing of it is saved.",
        ge=1,
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
