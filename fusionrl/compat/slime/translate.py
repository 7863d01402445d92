"""Translate slime's command line to fusionrl flags. Pure, except that it looks into folders of weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusionrl.compat.slime.flags import RENAMED, SECRETS, TABLE, Kind, as_text, name_of
from fusionrl.config.hooks import flag_of
from fusionrl.config.passed_flags import DP_ATTENTION, DP_SIZE, ENGINE_SIZE, Translated, is_torch_dist

Form = Literal["torch_dist", "hf"]
# The name that it has now, that of before September 2025, and miles'.
_SFT = tuple(
    f"{module}.generate_rollout"
    for module in ("slime.rollout.sft_rollout", "slime.rollout.sft_example", "miles.rollout.sft_rollout")
)
_RENAMED_OPTIONS = {"sglang_disable_piecewise_cuda_graph": "--sglang-disable-prefill-cuda-graph"}  # SGLang's own
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_OF_SFT = (
    *("rollout_function_path", "debug_train_only", "loss_type", "disable_compute_advantages_and_returns"),
    "advantage_estimator",
)
_OF_FSDP = ("train_backend", "attn_implementation", "gradient_checkpointing", "dp_replicate_size")
_RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
_BLANK_SOURCE = "fusionrl.buffer.data_source.RolloutDataSourceWithBuffer"


@dataclass
class _Given:
    """One flag as it stands on the command line; `tokens` are it and its values."""

    name: str
    values: list[str]
    tokens: list[str]

    @property
    def shown(self) -> str:
        return " ".join([flag_of(self.name), *([] if self.name in SECRETS else self.values)])


def form_of(path: str) -> Form | None:
    """Return what a folder of weights is; None: no such folder, or an empty one."""
    folder = Path(path)
    if is_torch_dist(folder):
        return "torch_dist"
    return "hf" if (folder / "config.json").is_file() and not (folder / "checkpoints").is_dir() else None


def translate(argv: Sequence[str], form: Callable[[str], Form | None] = form_of) -> Translated:
    """Translate a command line. `form`: of a folder of weights."""
    result = Translated()
    flags = _grouped(argv, result.errors)
    names = {flag.name: flag for flag in flags}
    for flag in _without_groups(flags, names, result):
        entry = TABLE.get(flag.name)
        if entry is None:
            result.argv += _own(flag, names, result)
        elif flag.name == "eval_max_context_len" and flag.values == _values(names, "rollout_max_context_len"):
            result.notes.append(
                f"{flag.shown}: left out: evaluation sets have --rollout-max-context-len, which is the same"
            )
        elif entry.kind is Kind.RENAMED and len(flag.values) >= abs(entry.arity):
            _rename(flag, names, result)
        elif error := entry.accept(flag.name, flag.values, result.accepted):
            result.errors.append(error)
    _folders(names, result, form)
    return result


def _values(names: dict[str, _Given], name: str) -> list[str] | None:
    return names[name].values if name in names else None


def _grouped(argv: Sequence[str], errors: list[str]) -> list[_Given]:
    """Divide a command line into flags with their values; a flag of the table takes as many as it has."""
    flags: list[_Given] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        _, equals, value = token.partition("=")
        name = name_of(token)
        entry = TABLE.get(name) if token.startswith("--") else None
        position += 1
        if not token.startswith("--"):
            if flags and flags[-1].name not in TABLE:
                flags[-1].values.append(token)
                flags[-1].tokens.append(token)
            elif flags:
                errors.append(f"{token}: unexpected after {flag_of(flags[-1].name)}")
            else:
                flags.append(_Given("", [], [token]))
            continue
        values = [value] if equals else []
        num_missing = 0 if entry is None or equals else entry.arity
        while num_missing and position < len(argv) and not argv[position].startswith("--"):
            values.append(argv[position])
            position += 1
            num_missing -= 1
        flags.append(_Given(name, values, [token, *values] if not equals else [token]))
    return flags


def _own(flag: _Given, names: dict[str, _Given], result: Translated) -> list[str]:
    """Return the tokens for a flag without an entry in the table."""
    if flag.name in ("offload_train", "no_offload_train") and not flag.values and "=" not in flag.tokens[0]:
        return ["--offload-train", "always" if flag.name == "offload_train" else "never"]
    if flag.name == "micro_batch_size" and "use_dynamic_batch_size" in names:
        result.notes.append(f"{flag.shown}: left out: --use-dynamic-batch-size ignores it")
        return []
    if flag.name == "update_weight_transport" and flag.values == ["nccl"]:
        return ["--update-weight-transport", "auto"]
    if flag.name == "log_probs_chunk_size" and flag.values == ["-1"]:
        return []
    if flag.name == "prompt_data" and "disable_rollout_global_dataset" in names:
        result.notes.append(f"{flag.shown}: left out: with --disable-rollout-global-dataset nothing reads it")
        return []
    is_engine_size = flag.name in ENGINE_SIZE and flag.values == _values(names, "rollout_num_gpus_per_engine")
    if is_engine_size or (flag.name in DP_SIZE and flag.values == ["1"]):
        result.notes.append(f"{flag.shown}: left out: it is so")
        return []
    if flag.name == "sglang_enable_ep_moe":  # of older SGLang: as many parts of the experts as the engine has devices
        parts = ["--sglang-ep-size", *(_values(names, "rollout_num_gpus_per_engine") or ["1"])]
        result.notes.append(f"{flag.shown}: it is {' '.join(parts)}")
        return parts
    if renamed := _RENAMED_OPTIONS.get(flag.name):
        result.notes.append(f"{flag.shown}: it is {renamed}")
        return [renamed]
    if flag.name == "sglang_dtype" and (dtype := _DTYPES.get(" ".join(flag.values))):
        result.notes.append(f"{flag.shown}: it is --rollout-dtype {dtype}")
        return ["--rollout-dtype", dtype]
    return flag.tokens


def _rename(flag: _Given, names: dict[str, _Given], result: Translated) -> None:
    if flag.name in ("save", "load", "ckpt_step", "ref_ckpt_step", "opd_teacher_ckpt_step"):
        return  # together, by `_folders`
    if flag.name == "disable_rollout_global_dataset":
        source = [] if "data_source_path" in names else ["--data-source-path", _BLANK_SOURCE]
        result.argv += source
        fate = f"it is {' '.join(source)}" if source else "left out"
        result.notes.append(f"{flag.shown}: {fate}: no --prompt-data")
        return
    if flag.name == "spec":
        path = ".".join(flag.values)
        if path.startswith("slime_plugins.models."):
            result.accepted["spec"] = flag.values
        else:
            result.argv += ["--custom-spec-path", path]
            result.notes.append(f"{flag.shown}: it is --custom-spec-path {path}")
        return
    entry = RENAMED[flag.name]
    assert entry.text.startswith("--") and ":" not in entry.text, entry.text  # a remark is not a command line
    written = [*entry.text.split(), *(flag.values if entry.arity else [])]
    result.argv += written
    result.notes.append(f"{flag.shown}: it is {' '.join(written)}")


# ------------------------------------------------------------------------------------------------ several flags at once
def _without_groups(flags: list[_Given], names: dict[str, _Given], result: Translated) -> list[_Given]:
    """Return the flags without groups that mean one thing together: SFT, FSDP, data-parallel attention."""

    def leave_out(is_gone: Callable[[str], bool], reason: str) -> None:
        gone = [flag for flag in flags if is_gone(flag.name)]
        result.notes.append(f"{', '.join(flag.shown for flag in gone)}: {reason}")
        flags[:] = [flag for flag in flags if flag not in gone]

    if any(value in _SFT for value in _values(names, "rollout_function_path") or ()):
        result.argv += ["--mode", "sft"]
        leave_out(_OF_SFT.__contains__, "they are --mode sft")
    if _values(names, "train_backend") == ["fsdp"]:
        leave_out(
            lambda name: name in _OF_FSDP or name.startswith("fsdp_"),
            "Megatron-core trains, with the same loss; a model that does not fit is divided by"
            " --tensor-model-parallel-size and its like",
        )
        if "gradient_checkpointing" in names and "recompute_granularity" not in names:
            result.argv += _RECOMPUTE
            result.notes.append(f"--gradient-checkpointing: it is {' '.join(_RECOMPUTE)}")
    if "sglang_enable_dp_attention" in names:  # without a size, SGLang itself does nothing
        leave_out(
            DP_ATTENTION.__contains__,
            "left out: an engine is divided by tensor parallelism alone, which gives the same tokens at another speed",
        )
    return flags


def _folders(names: dict[str, _Given], result: Translated, form: Callable[[str], Form | None]) -> None:
    """--save, --load, --ref-load and their steps: what the run starts from, resumes from, and writes to."""

    def value(name: str) -> str | None:
        flag = names.get(name)
        return flag.values[0] if flag is not None and flag.values else None

    save, load, reference = value("save"), value("load"), value("ref_load")
    step, ref_step, teacher_step = value("ckpt_step"), value("ref_ckpt_step"), value("opd_teacher_ckpt_step")
    for flag, text in (("--ckpt-step", step), ("--ref-ckpt-step", ref_step), ("--opd-teacher-ckpt-step", teacher_step)):
        if text is not None and not text.isdecimal():
            result.errors.append(f"{flag} {text}: expected a whole number")
            return
    if save is not None:
        result.argv += ["--run-dir", save]
        result.notes.append(f"--save {save}: it is --run-dir {save}; checkpoints lie in it")
    has_start = load is not None and _load(load, save, step, result, form)
    has_start = has_start or "megatron_checkpoint" in names
    if reference is not None:
        _reference(reference, ref_step, has_start, result, form)
    if teacher_step is not None and (teacher := value("opd_teacher_load")) is not None:
        _replace(result, "--opd-teacher-load", _of_step(teacher, teacher_step))


def _load(
    load: str, save: str | None, step: str | None, result: Translated, form: Callable[[str], Form | None]
) -> bool:
    """Say what --load is here; returns whether the policy's weights come from it."""
    kind, is_run = form(load), (Path(load) / "checkpoints").is_dir()
    is_same = save is not None and load.rstrip("/") == save.rstrip("/")
    if kind is None and step is not None and not is_run:
        kind = "torch_dist"  # on the machine of the run: only such a checkpoint has steps
    if kind == "torch_dist":
        folder = load if step is None else _of_step(load, step)
        result.argv += ["--megatron-checkpoint", folder]
        result.notes.append(f"--load {load}: its weights are read (--megatron-checkpoint {folder})")
        if is_same:  # a folder of another program's checkpoints: the run goes next to it
            run_dir = f"{load.rstrip('/')}_fusionrl"
            _replace(result, "--run-dir", run_dir)
            result.argv += ["--resume"]
            result.notes.append(
                f"--save {save}: it holds checkpoints of another program; the run goes to --run-dir {run_dir} --resume"
            )
        return True
    if step is not None:
        result.errors.append(
            f"--ckpt-step {step}: --load {load} is not a torch_dist checkpoint; --resume takes the last one"
        )
    if is_same and kind is None:
        result.argv += ["--resume"]
        result.notes.append(
            f"--load {load}: it is --resume: the run continues there, or starts if the folder has none yet. If it has"
            f" checkpoints from slime, for its weights: --megatron-checkpoint {load}, with another --run-dir"
        )
        return False
    if kind == "hf":
        _replace(result, "--hf-checkpoint", load)
        result.notes.append(f"--load {load}: it is --hf-checkpoint")
        return True
    if is_run:
        result.errors.append(f"--load {load}: it is a run's folder; to resume it: --run-dir {load} --resume")
    else:
        result.notes.append(f"--load {load}: nothing is there; the run starts with its other weights")
    return False


def _reference(
    reference: str, step: str | None, has_start: bool, result: Translated, form: Callable[[str], Form | None]
) -> None:
    kind = form(reference)
    folder = reference if step is None else _of_step(reference, step)
    if step is not None:
        _replace(result, "--ref-load", folder)
    if kind == "torch_dist" and not has_start:
        # slime starts the policy with the reference's weights; then the reference is what the run starts with.
        _replace(result, "--ref-load", None)
        result.argv += ["--megatron-checkpoint", folder]
        result.notes.append(f"--ref-load {folder}: policy and reference both start with it (--megatron-checkpoint)")


def _replace(result: Translated, flag: str, value: str | None) -> None:
    """Give `flag` another value on the command line; None: take it away."""
    written = [] if value is None else [flag, value]
    for position, token in enumerate(result.argv):
        if token == flag or token.startswith(flag + "="):
            result.argv[position : position + (2 if token == flag else 1)] = written
            return
    result.argv += written


def _of_step(folder: str, step: str) -> str:
    return f"{folder.rstrip('/')}/iter_{int(step):07d}"


def accepted_notes(accepted: dict[str, object]) -> list[str]:
    """Return a line for each reason for which flags that were accepted change nothing; shapes are compared instead."""
    lines: dict[str, list[str]] = {}
    for name, value in accepted.items():
        entry = TABLE.get(name)
        if entry is None or entry.kind is Kind.SHAPE:
            continue
        if entry.kind is Kind.REFUSED:
            reason = "it asks for what is so here anyway"
        elif entry is RENAMED["spec"]:
            reason = "the model's family builds the layers"
        else:
            reason = entry.text
        texts = [str(item) for item in value] if isinstance(value, list) else [] if value is True else [as_text(value)]
        lines.setdefault(reason, []).append(" ".join([flag_of(name), *texts]))
    return [f"no effect: {reason}: {', '.join(flags)}" for reason, flags in lines.items()]
