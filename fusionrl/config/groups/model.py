"""The model and the push of its weights: ModelGroup, WeightsGroup."""

from typing import Literal

from fusionrl.config import scopes
from fusionrl.config.groups.base import Group, acting, always, of_engines, of_pushes, of_trainers

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
        "first", "Which pushes are verified by checksums and by log-probs."
    )
    verify_tolerance: float | None = acting(scopes.PUSHES, scopes.VERIFIES)(
        None, "Mean |log-prob difference| a verified push may show. Default: 1e-4 in fp32, else 0.1.", gt=0
    )
    update_weight_timeout_s: float = of_pushes(600.0, "Time limit of one weight push, seconds.", gt=0)
