"""A command line as slime's users write it → flags of ours. Pure, but for looking at what a folder of weights is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusionrl.compat.slime.flags.table import RENAMED, SECRETS, TABLE, Kind
from fusionrl.config.hooks import flag_of
from fusionrl.config.slime_flags import DP_ATTENTION, DP_SIZE, ENGINE_SIZE, Translated, is_torch_dist

Form = Literal["torch_dist", "hf"]
# The name that it has now, that of before September 2025, and miles'.
_SFT = tuple(
    f"{module}.generate_rollout"
    for module in ("slime.rollout.sft_rollout", "slime.rollout.sft_example", "miles.rollout.sft_rollout")
)
_DIRECT = {
    "decoder_first_pipeline_num_layers": "--num-layers-in-first-pipeline-stage",
    "decoder_last_pipeline_num_layers": "--num-layers-in-last-pipeline-stage",
    "fp8_format": "--fp8",
    "sglang_router_policy": "--router-policy",
    "sglang_router_port": "--router-port",
    "sglang_router_request_timeout_secs": "--router-request-timeout-secs",
}
_RENAMED_OPTIONS = {"sglang_disable_piecewise_cuda_graph": "--sglang-disable-prefill-cuda-graph"}  # SGLang's own
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_OF_FSDP = ("train_backend", "attn_implementation", "gradient_checkpointing", "dp_replicate_size")
_RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
_BLANK_SOURCE = "fusionrl.buffer.data_source.RolloutDataSourceWithBuffer"
_SWITCHES = {
    "bf16": ["--precision", "bf16"],
    "no_rope_fusion": ["--no-apply-rope-fusion"],
    "check_weight_update_equal": ["--verify-weights", "always"],
    "offload": ["--offload-train", "always", "--offload-rollout"],
}


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
    given = _grouped(argv, result.errors)
    names = {one.name: one for one in given}
    is_sft = any(value in _SFT for value in getattr(names.get("rollout_function_path"), "values", ()))
    if is_sft:
        given = _as_sft(given, result)
    given = _without_fsdp(given, names, result)
    given = _without_dp_attention(given, names, result)
    for one in given:
        entry = TABLE.get(one.name)
        if entry is None:
            result.argv += _own(one, names, result)
        elif one.name == "eval_max_context_len" and one.values == _values(names, "rollout_max_context_len"):
            result.notes.append(
                f"{one.shown}: left out: evaluation sets have --rollout-max-context-len, which is the same"
            )
        elif entry.kind is Kind.RENAMED and len(one.values) >= abs(entry.arity):
            _rename(one, names, result)
        elif error := entry.accept(one.name, one.values, result.accepted):
            result.errors.append(error)
    _folders(names, result, form)
    return result


def _values(names: dict[str, _Given], name: str) -> list[str] | None:
    return names[name].values if name in names else None


def _grouped(argv: Sequence[str], errors: list[str]) -> list[_Given]:
    """Divide a command line into flags with their values; a flag of the table takes as many as it has."""
    given: list[_Given] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        _, equals, value = token.partition("=")
        name = _name(token)
        entry = TABLE.get(name) if token.startswith("--") else None
        position += 1
        if not token.startswith("--") or name is None:
            if given and given[-1].name not in TABLE:
                given[-1].values.append(token)
                given[-1].tokens.append(token)
            elif given:
                errors.append(f"{token}: unexpected after {flag_of(given[-1].name)}")
            else:
                given.append(_Given("", [], [token]))
            continue
        values = [value] if equals else []
        wanted = 0 if entry is None or equals else entry.arity
        while wanted and position < len(argv) and not argv[position].startswith("--"):
            values.append(argv[position])
            position += 1
            wanted -= 1
        given.append(_Given(name, values, [token, *values] if not equals else [token]))
    return given


def _name(token: str) -> str:
    return token.partition("=")[0].removeprefix("--").replace("-", "_")


def _own(one: _Given, names: dict[str, _Given], result: Translated) -> list[str]:
    """Return a flag of ours, or of a part, in the form that it has here."""
    if one.name in ("offload_train", "no_offload_train") and not one.values and "=" not in one.tokens[0]:
        return ["--offload-train", "always" if one.name == "offload_train" else "never"]
    if one.name == "micro_batch_size" and "use_dynamic_batch_size" in names:
        result.notes.append(f"{one.shown}: left out: beside --use-dynamic-batch-size nothing reads it")
        return []
    if one.name == "update_weight_transport" and one.values == ["nccl"]:
        return ["--update-weight-transport", "auto"]
    if one.name == "log_probs_chunk_size" and one.values == ["-1"]:
        return []
    if one.name == "prompt_data" and "disable_rollout_global_dataset" in names:
        result.notes.append(f"{one.shown}: left out: with --disable-rollout-global-dataset nothing reads it")
        return []
    is_engine_size = one.name in ENGINE_SIZE and one.values == _values(names, "rollout_num_gpus_per_engine")
    if is_engine_size or (one.name in DP_SIZE and one.values == ["1"]):
        result.notes.append(f"{one.shown}: left out: it is so")
        return []
    if one.name == "sglang_enable_ep_moe":  # of older SGLang: as many parts of the experts as the engine has devices
        parts = ["--sglang-ep-size", *(_values(names, "rollout_num_gpus_per_engine") or ["1"])]
        result.notes.append(f"{one.shown}: it is {' '.join(parts)}")
        return parts
    if renamed := _RENAMED_OPTIONS.get(one.name):
        result.notes.append(f"{one.shown}: it is {renamed}")
        return [renamed]
    if one.name == "sglang_dtype" and (dtype := _DTYPES.get(" ".join(one.values))):
        result.notes.append(f"{one.shown}: it is --rollout-dtype {dtype}")
        return ["--rollout-dtype", dtype]
    return one.tokens


def _rename(one: _Given, names: dict[str, _Given], result: Translated) -> None:
    if one.name in ("save", "load", "ckpt_step", "ref_ckpt_step", "opd_teacher_ckpt_step"):
        return  # together, by `_folders`
    if one.name == "disable_rollout_global_dataset":
        source = [] if "data_source_path" in names else ["--data-source-path", _BLANK_SOURCE]
        result.argv += source
        result.notes.append(
            f"{one.shown}: {f'it is {chr(32).join(source)}' if source else 'left out'}: no --prompt-data"
        )
        return
    if one.name == "spec":
        path = ".".join(one.values)
        if path.startswith("slime_plugins.models."):
            result.accepted["spec"] = one.values
        else:
            result.argv += ["--custom-spec-path", path]
            result.notes.append(f"{one.shown}: it is --custom-spec-path {path}")
        return
    written = _SWITCHES.get(one.name) or [_DIRECT[one.name], *one.values]
    result.argv += written
    result.notes.append(f"{one.shown}: it is {' '.join(written)}")


# ------------------------------------------------------------------------------------------------ several flags at once
def _as_sft(given: list[_Given], result: Translated) -> list[_Given]:
    """Return the flags less those that make an SFT run of slime's: it is a mode here."""
    left_out = {
        *("rollout_function_path", "debug_train_only", "loss_type", "disable_compute_advantages_and_returns"),
        *("advantage_estimator",),
    }
    gone = [one.shown for one in given if one.name in left_out]
    result.argv += ["--mode", "sft"]
    result.notes.append(f"{', '.join(gone)}: they are --mode sft")
    return [one for one in given if one.name not in left_out]


def _without_fsdp(given: list[_Given], names: dict[str, _Given], result: Translated) -> list[_Given]:
    """Return the flags less those of training by FSDP, where a launch asks for it: Megatron-core has the same loss."""
    if "train_backend" not in names or names["train_backend"].values != ["fsdp"]:
        return given
    gone = [one for one in given if one.name in _OF_FSDP or one.name.startswith("fsdp_")]
    result.notes.append(
        f"{', '.join(one.shown for one in gone)}: Megatron-core trains, with the same loss; a model that does not fit"
        " is divided by --tensor-model-parallel-size and its like"
    )
    if "gradient_checkpointing" in names and "recompute_granularity" not in names:
        result.argv += _RECOMPUTE
        result.notes.append(f"--gradient-checkpointing: it is {' '.join(_RECOMPUTE)}")
    return [one for one in given if one not in gone]


def _without_dp_attention(given: list[_Given], names: dict[str, _Given], result: Translated) -> list[_Given]:
    """Return the flags less those of data-parallel attention; without a size, SGLang itself does nothing."""
    if "sglang_enable_dp_attention" not in names:
        return given
    gone = [one.shown for one in given if one.name in DP_ATTENTION]
    result.notes.append(
        f"{', '.join(gone)}: left out: an engine is divided by tensor parallelism alone, which gives the same tokens at"
        " another speed"
    )
    return [one for one in given if one.name not in DP_ATTENTION]


def _folders(names: dict[str, _Given], result: Translated, form: Callable[[str], Form | None]) -> None:
    """--save, --load, --ref-load and their steps: what the run starts with, goes on with, and writes to."""

    def value(name: str) -> str | None:
        one = names.get(name)
        return one.values[0] if one is not None and one.values else None

    save, load, reference = value("save"), value("load"), value("ref_load")
    step, ref_step, teacher_step = value("ckpt_step"), value("ref_ckpt_step"), value("opd_teacher_ckpt_step")
    for flag, text in (("--ckpt-step", step), ("--ref-ckpt-step", ref_step), ("--opd-teacher-ckpt-step", teacher_step)):
        if text is not None and not text.isdecimal():
            result.errors.append(f"{flag} {text}: a whole number is wanted")
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
    kind = form(load)
    if kind is None and step is not None and not _is_run(load):
        kind = "torch_dist"  # on the machine of the run: only such a checkpoint has steps
    if kind == "torch_dist":
        folder = load if step is None else _of_step(load, step)
        result.argv += ["--megatron-checkpoint", folder]
        result.notes.append(f"--load {load}: its weights are read (--megatron-checkpoint {folder})")
        if save is not None and _same(load, save):
            _without_run_dir(save, result)
        return True
    if step is not None:
        result.errors.append(
            f"--ckpt-step {step}: --load {load} is no torch_dist checkpoint; --resume takes the last one"
        )
    if save is not None and _same(load, save) and kind is None:
        result.argv += ["--resume"]
        result.notes.append(
            f"--load {load}: it is --resume: the run goes on there, and starts where there is none yet. A folder of"
            f" slime's checkpoints is no run: for its weights --megatron-checkpoint {load}, with another --run-dir"
        )
        return False
    if kind == "hf":
        _replace(result, "--hf-checkpoint", load)
        result.notes.append(f"--load {load}: it is --hf-checkpoint")
        return True
    if _is_run(load):
        result.errors.append(f"--load {load}: it is a run's folder; to go on there: --run-dir {load} --resume")
    else:
        result.notes.append(f"--load {load}: nothing is there; the run starts with its other weights")
    return False


def _is_run(folder: str) -> bool:
    return (Path(folder) / "checkpoints").is_dir()


def _without_run_dir(save: str, result: Translated) -> None:
    """A folder of another's checkpoints is no run's folder: the run lies in one beside it."""
    own = save.rstrip("/") + "_fusionrl"
    _replace(result, "--run-dir", own)
    result.argv += ["--resume"]
    result.notes.append(
        f"--save {save}: it holds checkpoints of another program; the run goes to --run-dir {own} --resume"
    )


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
        if token == flag:
            result.argv[position : position + 2] = written
            return
        if token.startswith(flag + "="):
            result.argv[position : position + 1] = written
            return
    result.argv += written


def _of_step(folder: str, step: str) -> str:
    return f"{folder.rstrip('/')}/iter_{int(step):07d}"


def _same(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


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
        shown = [str(item) for item in value] if isinstance(value, list) else [] if value is True else [_text(value)]
        lines.setdefault(reason, []).append(" ".join([flag_of(name), *shown]))
    return [f"no effect: {reason}: {', '.join(flags)}" for reason, flags in lines.items()]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
