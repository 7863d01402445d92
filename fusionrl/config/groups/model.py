"""The model and the push of its weights: ModelGroup, WeightsGroup."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fusionrl.config.groups.base import Group


class ModelGroup(Group):
    """Model and precision"""

    hf_checkpoint: str | None = Field(
        None,
        description="Hugging Face folder, or a name of the Hub (Qwen/Qwen3-0.6B; so do other flags of such folders):"
        " the model's shape, its tokenizer and the weights the run starts with.",
    )
    debug_random_weights: bool = Field(
        False,
        description="Train random weights of --hf-checkpoint's shape: for benchmarks. Only its config.json is read.",
    )
    megatron_checkpoint: str | None = Field(
        None,
        description="Folder of a Megatron checkpoint (torch_dist: Megatron-LM's, slime's or our own) whose weights the"
        " run starts with; config and tokenizer are still --hf-checkpoint's.",
    )
    custom_model_provider_path: str | None = Field(
        None, description="Function that builds a pipeline stage of the policy: Megatron's GPTModel, with its names."
    )
    custom_spec_path: str | None = Field(
        None,
        description="Function `spec(args, config, vp_stage)` that returns Megatron's spec of the layers, or a function"
        " that builds a pipeline stage (slime's --spec).",
    )
    ref_load: str | None = Field(
        None,
        description="Folder of the reference model of the KL terms, Hugging Face's or torch_dist. Default: what the run"
        " starts with.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Precision of the trainers; auto is bf16 on GPUs and fp32 on a CPU."
    )
    rollout_dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Precision of the engines; auto is the trainers'."
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = Field(
        "auto",
        description="Layer implementation; auto is Transformer Engine's where it is installed, on GPUs in bf16.",
    )
    tensor_model_parallel_size: int = Field(1, description="Tensor parallel size of the trainers.", ge=1)
    pipeline_model_parallel_size: int = Field(1, description="Pipeline parallel size of the trainers.", ge=1)
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, description="Model chunks that each pipeline rank holds (interleaved 1F1B). Default: 1.", ge=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = Field(
        None, description="Layers of each such chunk; the other way to say the same.", ge=1
    )
    context_parallel_size: int = Field(1, description="Context parallel size of the trainers.", ge=1)
    expert_model_parallel_size: int = Field(1, description="Expert parallel size of the trainers.", ge=1)
    expert_tensor_parallel_size: int | None = Field(
        None, description="Tensor parallel size of the experts. Default: --tensor-model-parallel-size.", ge=1
    )


class WeightsGroup(Group):
    """Weight push"""

    update_weight_mode: Literal["full", "delta"] = Field(
        "full", description="What travels: all weights, or what has changed since the last push (transport disk)."
    )
    update_weight_transport: Literal["auto", "broadcast", "ipc", "disk"] = Field(
        "auto",
        description="How weights reach the engines; auto is ipc when colocated, else broadcast. disk: by files in a"
        " folder that trainers' and engines' nodes see (docs/guides/weight-push.md).",
    )
    update_weight_disk_dir: str | None = Field(
        None, description="That folder, for this run alone. Default: weights in the run's folder."
    )
    update_weight_disk_keep_files: bool = Field(
        False, description="Keep the files of all versions; else those of the last one, until the run ends."
    )
    update_weight_local_checkpoint_dir: str | None = Field(
        None,
        description="Folder for a copy of the weights on each host of engines, which they load; needed for delta."
        " Without it they load from --update-weight-disk-dir.",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = Field(
        "xor", description="How a delta says what changed: xor of all bits, or places and new values."
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "sha256", "adler32"] = Field(
        "xxh3-128", description="Checksum of what is pushed by files, and of each tensor that a delta has changed."
    )
    custom_update_weight_post_write_path: str | None = Field(
        None, description="Function called in every trainer when a version's files are there (docs/reference/hooks.md)."
    )
    update_weight_buffer_size: int = Field(
        512 * 1024**2, description="Bytes of one bucket of a weight push, at most.", ge=1024
    )
    pause_generation_mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="What a weight push does to requests that are running; in_place turns the prefix cache off.",
    )
    verify_weights: Literal["first", "always", "never"] = Field(
        "first", description="Which pushes are verified by checksums and by log-probs."
    )
    verify_tolerance: float | None = Field(
        None,
        description="Mean |log-prob difference| a verified push may show. Default: 1e-4 in fp32, else 0.1.",
        gt=0,
    )
    update_weight_timeout_s: float = Field(600.0, description="Time limit of one weight push, seconds.", gt=0)
