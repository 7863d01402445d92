"""The stages of the proof, most valuable first. Each shows what no machine without a GPU can."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from tools.proof.machine import ROOT
from tools.proof.stage import Failed, Figures, Setting, Stage

_PICTURES = "vision/train.parquet"
_COLUMNS = (
    "--input-key",
    "problem",
    "--label-key",
    "answer",
    "--multimodal-keys",
    '{"image": "images"}',
)  # geometry3k's
_PUBLISHED = ("FUSIONRL_PROOF_MODEL", "FUSIONRL_PROOF_DATA")  # folder of a Qwen2.5-VL or Qwen3-VL; geometry3k
_DRAFTS = ("spec_accept_rate", "spec_accept_length")
_FUSIONRL = [sys.executable, "-m", "fusionrl.cli", "train"]


# -------------------------------------------------------------------------------------------- runs
def _run(*flags: str, model: str = "model", data: str = "train.jsonl") -> Callable[[Setting], list[str]]:
    """The command of a run of two steps, every push verified."""

    def command(setting: Setting) -> list[str]:
        columns = _COLUMNS if data == _PICTURES else ("--input-key", "prompt", "--label-key", "label")
        base = [
            *("--mode", "rl", "--hf-checkpoint", str(setting.task / model)),
            *("--prompt-data", str(setting.task / data), *columns),
            *("--apply-chat-template", "--custom-rm-path", f"{ROOT}/tools/proof/hooks.py:partial_credit"),
            *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
            *("--lr", "1e-4", "--num-rollout", "2", "--no-save", "--verify-weights", "always"),
            *("--device", setting.device, "--run-dir", str(setting.folder / "run")),
        ]
        # A tiny model leaves nearly all of a GPU: a third is enough for its caches.
        gpu = [] if setting.rehearses else ["--sglang-mem-fraction-static", "0.3"]
        if gpu and "fp32" not in flags:  # heads of the tiny models are narrower than FlashAttention's smallest
            gpu += ["--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch"]
        return [*_FUSIONRL, *base, *gpu, *_on_this_device(flags, setting)]

    return command


def _on_this_device(flags: tuple[str, ...], setting: Setting) -> list[str]:
    """The flags; in a rehearsal without those that a CPU refuses."""
    if not setting.rehearses:
        return list(flags)
    flags = tuple(flag for flag in flags if not flag.startswith(("--sglang-speculative", "--sglang-mm-")))
    return [{"--use-rollout-routing-replay": "--use-routing-replay"}.get(flag, flag) for flag in flags]


def _read_run(limit: float) -> Callable[[Setting, int, str], Figures]:
    """Figures of a run: `limit` bounds the mean log-prob difference between engines and trainers."""

    def read(setting: Setting, code: int, output: str) -> Figures:
        if code:
            raise Failed("the run failed")
        folder = setting.folder / "run"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        verified = [row for row in rows if "sync/verify_logprob_diff" in row]
        trained = [row for row in rows if "train/logprob_diff_mean" in row]
        if len(verified) < 3 or len(trained) < 2:
            raise Failed(f"{len(verified)} pushes were verified and {len(trained)} steps trained, of 3 and 2")
        worst = max(float(row["sync/verify_logprob_diff"]) for row in verified)
        apart = max(float(row["train/logprob_diff_mean"]) for row in trained)
        if not max(worst, apart) <= limit:
            raise Failed(f"log-probs of engines and trainers differ by {max(worst, apart):.2e}, more than {limit:.0e}")
        logs = "".join(path.read_text(errors="replace") for path in sorted((folder / "logs").glob("trainer-*.log")))
        drafts = {name: trained[-1][f"rollout/{name}"] for name in _DRAFTS if f"rollout/{name}" in trained[-1]}
        rewards = [float(row["rollout/raw_reward"]) for row in trained]
        if len(rewards) > 2:
            drafts |= {
                "reward of the first and last five steps": f"{fmean(rewards[:5]):.3f}, {fmean(rewards[-5:]):.3f}"
            }
        return drafts | {
            "log-probs differ by": max(worst, apart),
            "equal tensors": int(verified[-1]["sync/verify_tensors"]),
            "push s": float(verified[-1]["perf/time_sync_s"]),
            "transport": (re.findall(r"MB by (\w+)", (folder / "plan.txt").read_text()) or ["?"])[0],
            "NCCL's buffers": "stay" if "process groups keep their buffers" in logs else "given away",
        }

    return read


def _geometry(*flags: str) -> Callable[[Setting], list[str]]:
    """The command of 20 steps of a published model on geometry3k; a rehearsal runs two of the tiny one on pictures."""

    def command(setting: Setting) -> list[str]:
        if setting.rehearses:
            return _run(*_COLOCATED, *flags, model="vision/model", data=_PICTURES)(setting)
        model, data = (os.environ[name] for name in _PUBLISHED)
        return [
            *(*_FUSIONRL, "--mode", "rl", "--hf-checkpoint", model, "--prompt-data", data, *_COLUMNS),
            *(
                "--apply-chat-template",
                "--rm-type",
                "math",
                "--rollout-batch-size",
                "16",
                "--n-samples-per-prompt",
                "8",
            ),
            *("--rollout-max-response-len", "1024", "--num-rollout", "20", "--lr", "1e-6", "--use-dynamic-batch-size"),
            *("--max-tokens-per-gpu", "4096", "--rollout-max-prompt-len", "2048", "--image-max-pixels", "1003520"),
            *("--no-save", "--verify-weights", "always", "--colocate", *flags),
            *("--run-dir", str(setting.folder / "run")),
        ]

    return command


# -------------------------------------------------------------------------------------------- benches and tests
def _read_json(*names: str) -> Callable[[Setting, int, str], Figures]:
    """Figures of a program that prints one JSON object at its end."""

    def read(setting: Setting, code: int, output: str) -> Figures:
        if code:
            raise Failed("the program failed")
        figures = json.loads(output[output.index("\n{") if not output.startswith("{") else 0 :])
        return {name: figures[name] for name in names}

    return read


def _trainer(shape: str, *flags: str) -> Callable[[Setting], list[str]]:
    def command(setting: Setting) -> list[str]:
        program = [sys.executable, str(ROOT / "tools/bench/trainer.py")]
        if setting.rehearses:
            return [*program, "--shape", "tiny", "--tokens", "256", "--sequence", "64", "--steps", "1"]
        return [*program, "--shape", shape, "--tokens", "16384", "--sequence", "16384", *flags]

    return command


def _loss(precision: str) -> Callable[[Setting], list[str]]:
    def command(setting: Setting) -> list[str]:
        small = ("--tokens", "64", "--vocab", "512", "--hidden", "32", "--turns", "1", "--threads", "1")
        size = small if setting.rehearses else ("--turns", "20")
        program = [sys.executable, str(ROOT / "tools/bench/loss.py"), "--device", setting.device]
        return [*program, "--precision", precision, "--json", str(setting.folder / "loss.json"), *size]

    return command


def _read_loss(setting: Setting, code: int, output: str) -> Figures:
    losses = json.loads((setting.folder / "loss.json").read_text())["entropy gradient: False"]["fusionrl"]
    if code and not setting.rehearses:  # its bounds hold at the real size
        raise Failed("out of its bounds")
    return {"time / plain": losses["s / plain"], "memory / plain": losses["MiB beyond gradients / plain"]}


def _tower(setting: Setting) -> list[str]:
    size = ("--width", "64", "--layers", "2", "--patches", "64", "--turns", "5") if setting.rehearses else ()
    return [sys.executable, "-m", "tools.bench.tower", "--device", setting.device, *size]


def _push(setting: Setting) -> list[str]:
    size = ("--shape", "tiny", "--turns", "1") if setting.rehearses else ("--turns", "3", "--engine")
    return [
        *(sys.executable, "-m", "tools.bench.weight_push", "--device", setting.device, "--receivers", "1"),
        *("--layouts", "tp1", "--buckets", "256", "--no-baseline", "--json", str(setting.folder / "push.json"), *size),
    ]


def _read_push(setting: Setting, code: int, output: str) -> Figures:
    if code:
        raise Failed("the program failed")
    rows = json.loads((setting.folder / "push.json").read_text())["rows"]
    lines = [line for line in output.splitlines() if "dropping" in line or "SGLang" in line]
    return {"rows": len(rows), "figures": "; ".join(lines)[-400:]}


def _step(setting: Setting) -> list[str]:
    tiny = ("--no-trl", "--turns", "1", "--steps", "1", "--prompts", "2", "--samples", "2", "--new-tokens", "8")
    size = tiny if setting.rehearses else ("--precision", "bf16", "--turns", "2")
    return [sys.executable, str(ROOT / "tools/bench/step.py"), "--model", str(setting.task / "model"), *size]


def _read_step(setting: Setting, code: int, output: str) -> Figures:
    if code:
        raise Failed("the program failed")
    figures = json.loads(output[output.rindex("\n{") if "\n{" in output else 0 :])
    return {name: value for name, value in figures.items() if isinstance(value, int | float | str)}


def _pytest(*arguments: str) -> Callable[[Setting], list[str]]:
    """Tests that need a GPU; a rehearsal only collects them."""

    def command(setting: Setting) -> list[str]:
        only = ["--collect-only"] if setting.rehearses else []
        places = [str(ROOT / argument) if argument.startswith("tests/") else argument for argument in arguments]
        return [sys.executable, "-m", "pytest", "-q", "--rootdir", str(ROOT), "-m", "gpu", *only, *places]

    return command


def _read_pytest(setting: Setting, code: int, output: str) -> Figures:
    last = (re.findall(r"^.*(?:passed|collected|tests? collected).*$", output, re.M) or [""])[-1]
    if code or not last or (" skipped" in last and " passed" not in last):
        raise Failed(f"pytest: {last or 'nothing was collected'}")
    return {"pytest": last.strip(" =")}


def _refusal(setting: Setting) -> list[str]:
    program = [sys.executable, "-m", "tools.proof.refusal", "--device", setting.device]
    return [*program, "--json", str(setting.folder / "refusal.json")]


def _read_refusal(setting: Setting, code: int, output: str) -> Figures:
    if code:
        raise Failed("the program failed")
    figures: Figures = json.loads((setting.folder / "refusal.json").read_text())
    return figures


def _repeats(*flags: str) -> Callable[[Setting], list[str]]:
    """The command of two runs with --bitwise."""

    def command(setting: Setting) -> list[str]:
        run = _run(*flags)(setting)
        place = run.index("--run-dir")  # each run gets its own
        run = run[:place] + run[place + 2 :]
        return [sys.executable, "-m", "tools.proof.repeats", str(setting.folder), *run]

    return command


def _read_repeats(setting: Setting, code: int, output: str) -> Figures:
    if code:
        raise Failed("a run failed")
    figures: Figures = json.loads((setting.folder / "repeats.json").read_text())
    return figures


def _parity(setting: Setting) -> list[str]:
    only = "llama TP 2" if setting.rehearses else "TP 2"
    return [
        *(sys.executable, str(ROOT / "tools/parity.py"), "--only", only, "--max-ranks", "2"),
        *("--json", str(setting.folder / "parity.json")),
    ]


def _read_parity(setting: Setting, code: int, output: str) -> Figures:
    if code:
        raise Failed("a layout is out of bounds")
    return {"layouts": len(json.loads((setting.folder / "parity.json").read_text()))}


_COLOCATED = ("--colocate",)
_RECOMPUTED = (*("--recompute-granularity", "full", "--recompute-method", "uniform"), *("--recompute-num-layers", "1"))
_IN_TORCH = ("--sglang-mm-attention-backend=sdpa",)  # heads of the tiny tower are narrow, too
_NEXTN = (
    *("--sglang-speculative-algorithm=NEXTN", "--sglang-speculative-num-steps=1"),
    *("--sglang-speculative-eagle-topk=1", "--sglang-speculative-num-draft-tokens=2"),
)
_ADAPTERS = ("--lora-rank", "8", "--lora-push")
_SPLIT = ("--rollout-num-gpus", "1", "--update-weight-transport", "broadcast")
STAGES = (
    Stage(
        "loop-bf16",
        ("the loop colocated", "checksums of engines' tensors", "the trainers give their memory", "NCCL's buffers"),
        _run(*_COLOCATED, "--precision", "bf16"),
        _read_run(0.1),
    ),
    Stage("fp32", ("the loop in fp32",), _run(*_COLOCATED, "--precision", "fp32"), _read_run(1e-3)),
    Stage("broadcast", ("NCCL broadcast push",), _run(*_SPLIT), _read_run(0.1), num_gpus=2),
    Stage(
        "tp2",
        ("an engine of TP 2",),
        _run(*_COLOCATED, "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "2"),
        _read_run(0.1),
        num_gpus=2,
    ),
    # With a reference, whose weights are lent to the model from pinned memory.
    Stage(
        "ppo",
        ("actor and critic",),
        _run(*_COLOCATED, "--algorithm", "ppo", "--use-kl-loss", "--kl-loss-coef", "0.01"),
        _read_run(0.1),
    ),
    Stage(
        "routing",
        ("trainers use the experts", "engines' own routings"),
        _run(*_COLOCATED, "--use-rollout-routing-replay", model="experts"),
        _read_run(0.1),
    ),
    Stage("delta", ("the loop with gated delta nets",), _run(*_COLOCATED, model="delta"), _read_run(0.1)),
    Stage(
        "drafts",
        ("engines draft with the layer",),
        _run(*_COLOCATED, "--enable-mtp-training", *_NEXTN, model="drafts"),
        _read_run(0.1),
    ),
    Stage(
        "vision",
        ("the loop with images in bf16", "pushes of a vision tower"),
        _run(*_COLOCATED, *_IN_TORCH, model="vision/model", data=_PICTURES),
        _read_run(0.1),
    ),
    Stage(
        "vision-fp32",
        ("the loop with images in fp32",),
        _run(*_COLOCATED, *_IN_TORCH, "--precision", "fp32", model="vision/model", data=_PICTURES),
        _read_run(1e-3),
    ),
    Stage(
        "vision-frozen",
        ("a frozen tower",),
        _run(
            *(*_COLOCATED, *_IN_TORCH, "--freeze-vision", "--sglang-mm-feature-transport=cuda_ipc"),
            model="vision/model",
            data=_PICTURES,
        ),
        _read_run(0.1),
    ),
    Stage(
        "vision-layers",
        ("models that see in bf16", "positions on three axes"),
        _pytest("tests/trainer/test_vision.py"),
        _read_pytest,
    ),
    Stage("vision-pixels", ("torchvision's image processor",), _pytest("tests/data/test_images.py"), _read_pytest),
    Stage("vision-tower", ("vision towers alone",), _tower, _read_json("qwen2_5_vl", "qwen3_vl")),
    Stage(
        "geometry3k",
        ("geometry3k with the tower trained",),
        _geometry(*_RECOMPUTED),
        _read_run(0.1),
        variables=_PUBLISHED,
        limit_s=1800.0,
    ),
    Stage(
        "geometry3k-frozen",
        ("geometry3k with a frozen tower",),
        _geometry("--freeze-vision"),
        _read_run(0.1),
        variables=_PUBLISHED,
        limit_s=1800.0,
    ),
    Stage("adapters", ("adapters in the loop",), _run(*_COLOCATED, *_ADAPTERS, "adapter"), _read_run(0.1)),
    Stage("adapters-merged", ("adapters merged",), _run(*_COLOCATED, *_ADAPTERS, "merged"), _read_run(0.1)),
    Stage(
        "adapters-experts",
        ("adapters of experts",),
        _run(*_COLOCATED, *_ADAPTERS, "auto", model="experts"),
        _read_run(0.1),
    ),
    Stage(
        "repeats",
        ("a run with `--bitwise` repeats", "the mismatch left with `--bitwise`"),
        _repeats(*_COLOCATED, "--precision", "bf16", "--rollout-dtype", "bf16"),
        _read_repeats,
        limit_s=300.0,  # two runs
    ),
    Stage("kinds", ("windows, sinks and delta nets",), _pytest("tests/trainer/test_gpu_layers.py"), _read_pytest),
    Stage("fp8", ("engines in block-wise fp8",), _pytest("tests/e2e/test_gpu.py", "-k", "fp8"), _read_pytest),
    Stage("push", ("a push through CUDA IPC",), _push, _read_push),
    Stage("loss-fp32", ("the loss with the output layer",), _loss("fp32"), _read_loss),
    Stage("loss-bf16", ("the same loss in bf16",), _loss("bf16"), _read_loss),
    Stage(
        "trainer-0.6b",
        ("trainer alone, Qwen3-0.6B", "Transformer Engine layers"),
        _trainer("qwen3-0.6b"),
        _read_json("impl", "mfu", "tokens_per_second", "peak_memory_gib"),
    ),
    Stage(
        "trainer-4b",
        ("trainer alone, Qwen3-4B",),
        _trainer("qwen3-4b", "--recompute"),
        _read_json("impl", "mfu", "tokens_per_second", "peak_memory_gib"),
    ),
    Stage(
        "optimizer-offload", ("the optimizer in host memory",), _pytest("tests/trainer/test_offload.py"), _read_pytest
    ),
    Stage("hashes", ("hashes of tensors on a GPU",), _pytest("tests/weights/test_checksums.py"), _read_pytest),
    Stage("refusal", ("an engine that refuses",), _refusal, _read_refusal, num_gpus=2),
    Stage("parity", ("layouts over NCCL",), _parity, _read_parity, num_gpus=2),
    Stage("step", ("one GRPO step against TRL",), _step, _read_step, packages=("trl",)),
)


def of_names(names: str | None) -> list[Stage]:
    """Return the stages of these names, separated by commas, in their order; None: all.

    Raises:
        ValueError: there is none of a name.
    """
    if names is None:
        return list(STAGES)
    chosen = names.split(",")
    unknown = sorted(set(chosen) - {stage.name for stage in STAGES})
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: unknown stage; see --list")
    return [stage for stage in STAGES if stage.name in chosen]


def pages_rows(root: Path) -> list[str]:
    """Return the rows of docs/results/gpu-results.md."""
    lines = (root / "docs" / "results" / "gpu-results.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith("| test ")]
