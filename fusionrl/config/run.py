"""Flags of a run: its work, place, checkpoints, pipeline and profiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from fusionrl.config import scopes
from fusionrl.config.scopes import Group, acting, always, of_engines, of_pushes, of_rl, of_steps, of_trainers
from fusionrl.pipeline.knobs import PIPELINES

# The table decides what the flag takes. A type checker cannot read a Literal of a table.
if TYPE_CHECKING:
    from fusionrl.config.config import Config

    PipelineName = str
else:
    PipelineName = Literal[tuple(PIPELINES)]

of_profile = acting(scopes.STEPS, scopes.PROFILED)
of_processes = acting(scopes.PROCESSES)
of_saves = acting(scopes.SAVES, scopes.SAVING)


class RunGroup(Group):
    """Run: kind, length and output files"""

    mode: Literal["rl", "sft", "reject-sampling", "eval"] = always(
        "rl", "Kind of run: rl, sft, reject-sampling or eval. It decides whether engines and trainers start."
    )
    pipeline: PipelineName = of_rl("on-policy", "How generation and training overlap.")
    name: str = always("run", "Name of the run, part of the default run folder.", pattern=r"^[\w.+-]+$")
    run_dir: str | None = always(None, "Folder of the run. Default: runs/<name>-<time>.")
    run_dir_mode: Literal["700", "750", "755", "770", "775"] = always(
        "700", "Permissions of the run's folders, in octal; files get the same without execution."
    )
    hook_env: list[str] = always(
        [], "Environment variables with secrets (e.g. OPENAI_API_KEY) for your functions (docs/guides/security.md)."
    )
    resume: bool = always(
        False,
        "Continue the run in --run-dir from its last checkpoint, or from the start if it has none. Without"
        " --hf-checkpoint, missing flags are read from the run; docs/guides/checkpoints.md.",
    )
    seed: int = of_trainers(1234, "Seed of initialisation, data order and trainers.", ge=0)
    bitwise: bool = acting(scopes.needed(scopes.PUSHES), scopes.needed(scopes.RL))(
        False,
        "On a CPU: engines and trainers compute the same bits, and the run fails where a log-prob differs. On GPUs:"
        " deterministic kernels on both sides, for runs that repeat (docs/guides/trouble.md).",
    )
    num_rollout: int | None = of_steps(None, "Number of rollout steps to run.", ge=0)
    num_epoch: int | None = acting(scopes.STEPS, scopes.EPOCHS)(
        None, "Epochs over the prompt data, unless --num-rollout is set.", ge=1
    )
    use_tensorboard: bool = always(False, "Write TensorBoard event files into the run folder as well.")
    dry_run: bool = always(False, "Check everything, print the plan and stop before Ray starts.")
    dashboard: bool = acting(scopes.NEEDS_PROCESSES, scopes.LOCAL_RAY)(
        False, "Start Ray's dashboard if this command starts the cluster."
    )
    log_level: Literal["debug", "info", "warning", "error"] = always("info", "Level of the log files.")
    log_samples: int = acting(scopes.SCORES)(
        0, "Samples of each rollout to print, a line each: reward, label, answer, prompt (also: `fusionrl show`).", ge=0
    )
    save_token_values: bool = acting(scopes.TRAINS, scopes.RL)(
        False,
        "Save the trainers' log-prob, entropy and advantage of every trained token with the samples, about"
        " 30 bytes a token; `fusionrl view` colours tokens by them. With a custom loss, not the entropy.",
    )
    keep_rollouts: int | None = of_steps(
        None,
        "Keep the samples in rollouts/ of this many of the newest steps, and of all since the newest checkpoint."
        " Default: all.",
        ge=1,
    )
    max_log_mb: int | None = of_steps(
        None, "Leave out the middle of a file in logs/ that is larger than this many MiB. Default: keep all.", ge=1
    )
    profile_steps: list[str] = acting(scopes.needed(scopes.STEPS))(
        [], "Steps to profile, numbered from 1, e.g. 3 or 5-7; docs/guides/profiling.md. Default: none."
    )
    profile_ranks: list[str] = of_profile(
        ["0", "engine-0"], "Trainers (by rank) and engines (engine-0, …) to profile; all: every one."
    )
    profile_tool: Literal["torch", "nsys", "memory"] = of_profile(
        "torch", "Profiler: torch's (shown by `fusionrl timeline`), nsys (Nsight Systems), or the GPU memory's history."
    )
    profile_continuous: bool = of_profile(False, "Write one profile for consecutive steps instead of one per step.")
    custom_config_path: str | None = always(
        None, "YAML file of custom names and values for the `args` of hooks; names of flags override the command line."
    )
    stall_warn_s: float = of_processes(
        60.0,
        "Report a phase that takes over five times its median and more than this many seconds (five times as many for"
        " the first of its kind), with all stacks; docs/guides/trouble.md.",
        gt=0,
    )
    stall_timeout_s: float | None = of_processes(
        None, "When a phase takes longer, start trainers that hang again, or else end the run with that report.", gt=0
    )
    max_restarts: int = always(
        3,
        "How often within an hour a router, Buffer or trainers that died may start again within the run, and with"
        " --supervise the driver; 0: a death ends the run (docs/guides/trouble.md).",
        ge=0,
    )
    supervise: bool = always(
        False,
        "Run in a process of its own, and start one that fails or is killed again with --resume, as often within an"
        " hour as --max-restarts says. On the command line alone.",
    )
    in_process: bool = always(
        False, "Run all but the engines in this process, without Ray; breakpoint() works (docs/guides/trouble.md)."
    )
    pdb: bool = acting(scopes.IN_PROCESS)(False, "When an error ends the run, open the debugger where it was raised.")
    debug_rollout_only: bool = always(False, "Run only the engines and the Buffer, without training.")
    debug_train_only: bool = always(False, "Run only the trainers, on saved rollouts (--load-debug-rollout-data).")
    load_debug_rollout_data: str | None = acting(scopes.REPLAYS)(
        None, "Path template with {rollout_id} of rollouts to train on instead of generating."
    )
    save_debug_rollout_data: str | None = of_steps(None, "Path template with {rollout_id} to save samples for replay.")


class ClusterGroup(Group):
    """Cluster: devices and placement"""

    device: Literal["auto", "cpu", "cuda"] = always("auto", "Device of engines and trainers.")
    ray_address: str | None = acting(scopes.NEEDS_PROCESSES)(
        None, "Address of a running Ray cluster. Default: start a local one."
    )
    allow_open_ray: bool = acting(scopes.OTHER_RAY)(
        False, "Join a Ray cluster without token authentication: anyone who reaches it can run code in it."
    )
    actor_num_nodes: int = of_trainers(1, "Number of trainer nodes.", ge=1)
    actor_num_gpus_per_node: int = of_trainers(1, "Trainer ranks per node; a device is a GPU, or a CPU process.", ge=1)
    rollout_num_gpus: int | None = of_engines(
        None, "Devices of all engines together. Default: those of the trainers if colocated, else 1.", ge=1
    )
    rollout_num_gpus_per_engine: int = of_engines(1, "Devices of one engine (its tensor parallel size).", ge=1)
    rollout_external_engine_addrs: list[str] = acting(scopes.needed(scopes.ENGINES))(
        [], "host:port of running engines to use as well; their key: FUSIONRL_ENGINE_KEY (docs/guides/engines.md)."
    )
    engine_group: list[str] = of_engines(
        [],
        "Engines of several sizes and flags: NAME:num_gpus=N,per_engine=N,role=ROLE,FLAG=VALUE, one for"
        " each group. Roles: generate, prefill, decode, eval. See docs/guides/engines.md.",
    )
    num_gpus_per_node: int = always(8, "Maximum devices per node when planning a placement.", ge=1)
    colocate: bool = of_pushes(False, "Engines and trainers share the same devices.")
    offload_rollout: bool = acting(scopes.PUSHES, scopes.COLOCATED, scopes.ON_GPUS)(
        True, "Colocated on GPUs: engines release their memory while the trainers work."
    )
    offload_train: Literal["auto", "always", "never"] = of_trainers(
        "auto",
        "Move the trainers' weights, gradient buffers and optimizer out while engines generate: from a GPU"
        " to host memory, on a CPU to a file. auto: when colocated on GPUs.",
    )
    offload_folder: str | None = acting(scopes.TRAINERS, scopes.OFFLOADS, scopes.ON_A_CPU)(
        None, "Folder of the --offload-train files on a CPU. Default: the system's temporary folder."
    )
    distributed_timeout_minutes: int = of_trainers(10, "Time limit of a collective operation, minutes.", ge=1)
    placement_timeout_s: float = always(120.0, "Time limit for the cluster to provide the devices, seconds.", gt=0)
    numa_affinity: bool = acting(scopes.PROCESSES, scopes.ON_GPUS)(
        True, "Bind trainers and engines to the CPUs near their GPUs; docs/guides/profiling.md."
    )
    peak_tflops: float | None = of_trainers(
        None, "Peak TFLOP/s of one device, for perf/mfu. Default: the data sheet's bf16 value for the GPU's name.", gt=0
    )
    train_num_threads: int | None = of_trainers(
        None, "CPU threads of one trainer rank. Default: cores divided among the ranks.", ge=1
    )

    @field_validator("rollout_num_gpus", mode="before")
    @classmethod
    def _has_an_own_engine(cls, value: object) -> object:
        if value in (0, "0"):
            raise PydanticCustomError(
                "own_engine",
                "a run needs at least one engine of its own, even with --rollout-external-engine-addrs: external"
                " engines may leave or die at any time; give 1 or more, or leave the flag out of a run without"
                " engines (--mode sft)",
            )
        return value


class PlanGroup(Group):
    """Of `fusionrl plan` alone"""

    cluster: str | None = always(
        None,
        "Plan for this cluster instead of this machine: NODESxGPUSxKIND, e.g. 8x8xh200. --hf-checkpoint may be a"
        " config.json alone, and so may a teacher or a reward model; nothing else is read. docs/guides/check.md has the"
        " kinds.",
    )
    router_imbalance: float = always(
        1.0,
        "Mixtures of experts, memory estimate: tokens that the busiest expert-parallel rank gets, for each token of an"
        " even share.",
        ge=1,
    )


class CheckpointGroup(Group):
    """Checkpoints"""

    save_interval: int | None = of_saves(None, "Rollout steps between checkpoints; without it: the last alone.", ge=1)
    no_save: bool = always(False, "Write no checkpoints at all.")
    snapshot_interval: int = acting(scopes.PROCESSES, scopes.TRAINS)(
        1,
        "Rollout steps between snapshots of the trainers' state in memory, from which all start again within the run"
        " when one dies (docs/guides/trouble.md). 0: from the last checkpoint.",
        ge=0,
    )
    async_save: bool = acting(scopes.NEEDS_PROCESSES, scopes.SAVES, scopes.TRAINS, scopes.SAVING)(
        False, "Write a checkpoint's files while training continues, from a copy in a process of each trainer."
    )
    verify_checkpoints: bool = acting(scopes.SAVES, scopes.CHECKS_SAVES)(
        False, "Store hashes of all state with each checkpoint, and refuse to resume from another (seconds per GB)."
    )
    keep_checkpoints: int | None = of_saves(None, "Keep this many of the newest checkpoints. Default: all.", ge=1)
    keep_best: str | None = acting(scopes.SAVES, scopes.SAVING, scopes.KEEPS_SOME)(
        None, "With --keep-checkpoints: also keep the one with the highest value of this metric (eval/<set>/accuracy)."
    )
    save_hf: str | None = acting(scopes.TRAINERS, scopes.needed(scopes.STEPS))(
        None, "Folder for the final weights in Hugging Face format, or adapters in PEFT's; {rollout_id} is filled in."
    )


PROFILES = "profiles"  # in the run's folder


@dataclass(frozen=True)
class ProfileOrder:
    """The order for profiles."""

    steps: tuple[tuple[int, int], ...]  # (first, last) of each stretch of steps, as in metrics.jsonl
    trainers: frozenset[int] | None  # ranks; None: all
    engines: frozenset[int] | None  # indices; None: all
    tool: str
    is_continuous: bool  # one trace for a stretch of steps, in place of one a step

    @classmethod
    def of(cls, config: Config) -> ProfileOrder | None:
        """Read the flags; None: the run takes no profile. ValueError: a value is not of its form."""
        run = config.run
        if not run.profile_steps:
            return None
        steps = tuple(_stretch(text) for text in run.profile_steps)
        trainers, engines = set[int](), set[int]()
        for text in run.profile_ranks:
            if text != "all":
                match = re.fullmatch(r"(engine-)?(\d+)", text)
                if match is None:
                    raise ValueError(f"--profile-ranks {text}: give a trainer's rank (0), an engine (engine-0), or all")
                (engines if match[1] else trainers).add(int(match[2]))
        is_all = "all" in run.profile_ranks
        return cls(
            steps,
            None if is_all else frozenset(trainers),
            None if is_all else frozenset(engines),
            run.profile_tool,
            run.profile_continuous,
        )

    def has(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.steps)

    def wants_trainer(self, rank: int) -> bool:
        return self.trainers is None or rank in self.trainers

    def wants_engine(self, index: int) -> bool:
        return self.engines is None or index in self.engines


def nsys_options(output: str) -> dict[str, str]:
    """Options of `nsys profile`: nothing is recorded but between start and stop of a profile, which makes a report."""
    return {
        "t": "cuda,nvtx,osrt,cublas,cudnn",
        "o": output,
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat",
        "kill": "none",
        "trace-fork-before-exec": "true",
        "force-overwrite": "true",
    }


def nsys_command(output: str) -> list[str]:
    """Return the beginning of a command line that is to be profiled."""
    options = nsys_options(output).items()
    return ["nsys", "profile", *(f"--{k}={v}" if len(k) > 1 else f"-{k}{v}" for k, v in options)]


def _stretch(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[1]) < 1 or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"--profile-steps {text}: expected steps from 1 on, e.g. 3 or 5-7")
    return int(match[1]), int(match[2] or match[1])
