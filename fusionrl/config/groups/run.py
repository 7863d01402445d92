"""Flags of a run: its work (RunGroup), its place (ClusterGroup) and its checkpoints (CheckpointGroup)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from fusionrl.config.groups.base import Group
from fusionrl.pipeline.knobs import PIPELINES

# The table decides what the flag takes. A type checker cannot read a Literal of a table.
if TYPE_CHECKING:
    PipelineName = str
else:
    PipelineName = Literal[tuple(PIPELINES)]


class RunGroup(Group):
    """Run: what is done, and where its files go"""

    mode: Literal["rl", "sft", "reject-sampling", "eval"] = Field(
        "rl",
        description="What the run does: rl, sft, reject-sampling or eval. Each toggles engines and trainers.",
    )
    pipeline: PipelineName = Field("on-policy", description="How generation and training overlap.")
    name: str = Field("run", description="Name of the run, part of the default run folder.", pattern=r"^[\w.+-]+$")
    run_dir: str | None = Field(None, description="Folder of the run. Default: runs/<name>-<time>.")
    run_dir_mode: Literal["700", "750", "755", "770", "775"] = Field(
        "700", description="Rights of the run's folders, in octal; files have the same less execution."
    )
    hook_env: list[str] = Field(
        default_factory=list,
        description="Environment variables with secrets (names such as OPENAI_API_KEY) that your functions get. No"
        " process of the run gets others; docs/guides/security.md.",
    )
    resume: bool = Field(
        False,
        description="Go on in --run-dir from its last checkpoint (from the start where there is none yet). Without"
        " --hf-checkpoint all flags that are not given are those of the run; docs/guides/checkpoints.md.",
    )
    seed: int = Field(1234, description="Seed of initialisation, data order and trainers.", ge=0)
    num_rollout: int | None = Field(None, description="Number of rollout steps to run.", ge=0)
    num_epoch: int | None = Field(
        None, description="Epochs over the prompt data, where --num-rollout is not given.", ge=1
    )
    use_tensorboard: bool = Field(False, description="Write TensorBoard event files into the run folder as well.")
    dry_run: bool = Field(False, description="Check everything, print the plan and stop before Ray starts.")
    dashboard: bool = Field(False, description="Start Ray's dashboard with a cluster that is started here.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the log files.")
    log_samples: int = Field(
        0,
        description="Samples of each rollout (rl, reject-sampling) that the console shows, a line each: reward, label,"
        " answer, prompt. `fusionrl show` shows all of them afterwards.",
        ge=0,
    )
    save_token_values: bool = Field(
        False,
        description="Trainers write their log-prob, entropy and advantage of every token that is trained on next to the"
        " samples, some 30 bytes a token; `fusionrl view` colours tokens by them. With a custom loss, the advantage"
        " alone.",
    )
    profile_steps: list[str] = Field(
        default_factory=list,
        description="Steps that are profiled, numbered from 1, e.g. 3 or 5-7; docs/guides/profiling.md. Default: none.",
    )
    profile_ranks: list[str] = Field(
        default_factory=lambda: ["0", "engine-0"],
        description="Trainers (by rank) and engines (engine-0, …) that are profiled; all: every one.",
    )
    profile_tool: Literal["torch", "nsys", "memory"] = Field(
        "torch",
        description="Profiler: torch's, whose traces `fusionrl timeline` shows; nsys (NVIDIA Nsight Systems); or the"
        " history of the GPU's memory.",
    )
    profile_continuous: bool = Field(
        False, description="Make one profile of steps that follow each other, in place of one a step."
    )
    custom_config_path: str | None = Field(
        None,
        description="YAML file of names and values of one's own, which hooks find in their `args`; names of flags"
        " go over the command line.",
    )
    stall_warn_s: float = Field(
        60.0,
        description="A phase that takes over five times its median is reported, but not before so many seconds (the"
        " first of its kind: five times as many), with whom it waits for and all stacks; docs/guides/trouble.md.",
        gt=0,
    )
    stall_timeout_s: float | None = Field(
        None, description="End the run with that report when a phase takes this many seconds.", gt=0
    )
    in_process: bool = Field(
        False,
        description="Run driver, Buffer, rewards and one trainer rank in this process, without Ray: breakpoint()"
        " stops in the terminal; engines stay children. docs/guides/debugging.md.",
    )
    pdb: bool = Field(
        False,
        description="With --in-process: where an error ends the run, open the debugger where it was raised.",
    )
    debug_rollout_only: bool = Field(False, description="Run the engines and the Buffer alone; nothing is trained.")
    debug_train_only: bool = Field(
        False, description="Run the trainers alone on rollouts saved before (--load-debug-rollout-data)."
    )
    load_debug_rollout_data: str | None = Field(
        None, description="Path template with {rollout_id} of rollouts to train on instead of generating."
    )
    save_debug_rollout_data: str | None = Field(
        None, description="Path template with {rollout_id} to save each rollout's samples for later replay."
    )


class ClusterGroup(Group):
    """Cluster: devices and placement"""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Device of engines and trainers.")
    ray_address: str | None = Field(
        None, description="Address of a Ray cluster that runs already; by default a local one is started."
    )
    allow_open_ray: bool = Field(
        False, description="Join a Ray cluster that asks nobody for a token: whoever reaches it can run code in it."
    )
    actor_num_nodes: int = Field(1, description="Nodes of the trainers.", ge=1)
    actor_num_gpus_per_node: int = Field(
        1, description="Trainer ranks a node; devices are GPUs, or processes on a CPU.", ge=1
    )
    rollout_num_gpus: int | None = Field(
        None,
        description="Devices of the engines in all. Default: the trainers' when colocated, else 1.",
        ge=1,
    )
    rollout_num_gpus_per_engine: int = Field(1, description="Devices of one engine (its tensor parallel size).", ge=1)
    rollout_external_engine_addrs: list[str] = Field(
        default_factory=list,
        description="Addresses (host:port) of engines that run already, and work beside the run's own"
        " (docs/guides/engines.md). Their key, if they have one: FUSIONRL_ENGINE_KEY.",
    )
    engine_group: list[str] = Field(
        default_factory=list,
        description="Engines of several sizes and flags: NAME:num_gpus=N,per_engine=N,role=ROLE,FLAG=VALUE, one for"
        " each group. Roles: generate, prefill, decode, eval. See docs/guides/engines.md.",
    )
    num_gpus_per_node: int = Field(8, description="Devices a node has, at most, when a placement is planned.", ge=1)
    colocate: bool = Field(False, description="Engines and trainers share the same devices.")
    offload_rollout: bool = Field(
        True, description="Colocated on GPUs: engines give their memory back while the trainers work."
    )
    offload_train: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Trainers copy weights, gradient buffers and optimizer out while engines generate: to host memory"
        " on a GPU, to a file on a CPU. auto: when colocated on GPUs.",
    )
    offload_folder: str | None = Field(
        None, description="Folder of such files on a CPU. Default: the system's for temporary files."
    )
    distributed_timeout_minutes: int = Field(10, description="Time limit of a collective operation, minutes.", ge=1)
    placement_timeout_s: float = Field(
        120.0, description="Time limit for the cluster to provide the devices, seconds.", gt=0
    )
    numa_affinity: bool = Field(
        True, description="Bind trainers and engines to the CPUs that are near their GPUs; docs/guides/profiling.md."
    )
    peak_tflops: float | None = Field(
        None,
        description="Peak of one device in TFLOP/s, of which perf/mfu is a share. Default: of the data sheet, in bf16,"
        " by the GPU's name; without it there is no perf/mfu.",
        gt=0,
    )
    train_num_threads: int | None = Field(
        None, description="CPU threads of one trainer rank. Default: cores shared out over the ranks.", ge=1
    )

    @field_validator("rollout_num_gpus", mode="before")
    @classmethod
    def _has_an_own_engine(cls, value: object) -> object:
        if value in (0, "0"):
            raise PydanticCustomError(
                "own_engine",
                "a run has at least one engine of its own, also beside --rollout-external-engine-addrs: engines of"
                " others may leave or die at any time, and then it answers; give 1 or more, or leave the"
                " flag out of a run without engines (--mode sft)",
            )
        return value


class CheckpointGroup(Group):
    """Checkpoints"""

    save_interval: int | None = Field(
        None, description="Rollout steps between checkpoints; without it only the last step is saved.", ge=1
    )
    no_save: bool = Field(False, description="Write no checkpoints at all.")
    async_save: bool = Field(
        False,
        description="Write a checkpoint's files while the run goes on: a process of each trainer writes a copy.",
    )
    verify_checkpoints: bool = Field(
        False,
        description="Keep hashes of weights, optimizer, RNG and data cursor with each checkpoint, and refuse to go on"
        " from one where what was loaded has others (seconds for each GB).",
    )
    keep_checkpoints: int | None = Field(
        None, description="Keep this many of the newest checkpoints and delete older ones. Default: all.", ge=1
    )
    keep_best: str | None = Field(
        None,
        description="With --keep-checkpoints: keep also the one with the highest value of this metric"
        " (eval/<set>/accuracy).",
    )
    save_hf: str | None = Field(
        None,
        description="Save the weights as a Hugging Face folder here at the end ({rollout_id} is filled in).",
    )
