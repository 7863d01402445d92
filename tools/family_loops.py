"""Run the loop of every family: real engines and trainers, every push confirmed, engines against trainers.

    python -m tools.family_loops --out DIR [--only TEXT] [--pipelines on-policy,one-step-off] [--json FILE]

Models that see run as text alone, and with images (`--only +images`). Rows with adapters run where TEXT has `+lora`:
every family with a merged push, and those of which engines take adapters with an adapter push.

A row is a run of `fusionrl train` of three steps with a tiny random model in fp32 on this machine's CPU. Its columns
are the largest difference of log-probs after a push (`sync/verify_logprob_diff`), and the mean one between the engine
that sampled and the trainer, of tokens that both compute with the same weights (`train/logprob_diff_mean`, so on-policy
alone). Exit code 1 where the first is over 1e-5 (2.5e-6 with adapters, so that both pushes of them differ by 5e-6 at
most) or the second over 1e-6 (3e-6 for delta nets), a step learns nothing, or a run fails. A row takes about 20 seconds
on two cores.
"""

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.make_quickstart import write_quickstart
from tools.make_vision_quickstart import rows as picture_rows
from tools.make_vision_quickstart import write_rows

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ("qwen3_5", "qwen3_5_moe")
SEEING = "+images"
LORA = "+lora"
MERGED, ADAPTER = f"{LORA} merged", f"{LORA} adapter"
_DELTA = ("qwen3_5", "qwen3_next")
PUSH_BOUND, ADAPTERS_BOUND, MEAN_BOUND, DELTA_BOUND = 1e-5, 2.5e-6, 1e-6, 3e-6
_LORA = {"mode": "rl", "rollout_num_gpus": 1, "lora_rank": 4}
WITHOUT_MLP = ("linear_fc1", "linear_fc2")


def families() -> list[str]:
    """Those that the tests know, and published folders."""
    from tests import tiny_vision
    from tests.trainer import hf_models

    alone = (*tiny_vision.KINDS, tiny_vision.KIMI)
    seeing = [f"{kind}{SEEING}" for kind in (*alone, *tiny_vision.HYBRIDS)]
    texts = (*hf_models.FAMILIES, *hf_models.SPARSE)
    adapted = [f"{family}{MERGED}" for family in texts]
    adapted += [f"{family}{ADAPTER}" for family in texts if adapter_flags(family) is not None]
    return [*texts, *PUBLISHED, *alone, *seeing, *adapted]


def adapter_flags(family: str) -> dict[str, Any] | None:
    """Return the flags with which engines take the family's adapters, on an MLP too if they can; None: they cannot."""
    from fusionrl.config.config import Config
    from fusionrl.models.shape import shape_from_hf_config
    from fusionrl.plan.trained_parts import adapter_push
    from tests.trainer import hf_models

    config = json.loads(hf_models.config_of(family, False).to_json_string(use_diff=False)) | {"model_type": family}
    for flags in ({}, {"exclude_modules": list(WITHOUT_MLP)}):
        push = adapter_push(Config.from_flat(_LORA | flags), shape_from_hf_config(config))
        if push is not None and push[0] == "adapter":
            return flags
    return None


def make_model(family: str, task: Path, folder: Path, **other_sizes: int) -> None:
    """Save a tiny random model of a family with the tokenizer of `task`/model, or its own where it sees.

    other_sizes  replace the usual ones, but of a model that sees
    """
    from transformers import AutoConfig, AutoTokenizer

    from tests import tiny_vision
    from tests.trainer import hf_models

    kind, _, _ = family.partition("+")
    if family.endswith(SEEING) or kind in (*tiny_vision.KINDS, tiny_vision.KIMI):
        tiny_vision.make_tiny_vlm(folder, kind)
        return
    family = kind
    tokens = AutoConfig.from_pretrained(task / "model")
    sizes = {name: getattr(tokens, name) for name in ("vocab_size", "max_position_embeddings", "eos_token_id")}
    if family in ("qwen2_moe", "qwen3_moe"):
        sizes |= {"decoder_sparse_step": 1}  # SGLang reads no other
    if family in ("glm4", "phi3"):  # gate and up are one tensor, which SGLang's CPU engine pads to 32 rows as a whole
        sizes |= {"intermediate_size": 64}
    sizes |= other_sizes
    is_tied = family == "gemma3_text"  # SGLang leaves out the output layer of one that is not
    if family in PUBLISHED:
        hf_models.make_published(folder.parent, f"{family}_text", False, **sizes)
        (folder.parent / "published").rename(folder)
    else:
        hf_models.make(folder, family, is_tied, **sizes)
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(folder)
    if family == "mimo":  # as the published folder has it: transformers knows no such model
        (folder / "configuration_mimo.py").write_text(_MIMO)
        file = folder / "config.json"
        auto_map = {"AutoConfig": "configuration_mimo.MiMoConfig"}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": auto_map}))


_MIMO = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""


_TEXTS = ("train.jsonl", "--input-key", "prompt", "--label-key", "label")
_PICTURES = ("pictures.parquet", "--input-key", "problem", "--label-key", "answer")
_PICTURES += ("--multimodal-keys", '{"image": "images"}')


def run_family(family: str, pipeline: str, task: Path, folder: Path) -> dict[str, Any]:
    """Run it; what it measured, and why it is out of bounds."""
    folder.mkdir(parents=True)
    make_model(family, task, folder / "model")
    file, *columns = _PICTURES if family.endswith(SEEING) else _TEXTS
    command = [
        *(sys.executable, "-m", "fusionrl.cli", "train", "--mode", "rl", "--hf-checkpoint", str(folder / "model")),
        *("--prompt-data", str(task / file), *columns),
        *("--apply-chat-template", "--custom-rm-path", f"{ROOT}/tools/proof/hooks.py:partial_credit"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "12"),
        *("--device", "cpu", "--num-rollout", "3", "--no-save", "--verify-weights", "always"),
        *("--rollout-num-gpus", "1", "--pipeline", pipeline, "--run-dir", str(folder / "run")),
    ]
    command += ["--sglang-trust-remote-code"] if family.startswith("mimo") else []
    name, has_adapters, push = family.partition(f"{LORA} ")
    command += ["--lr", "1e-2" if has_adapters else "1e-3"]
    if has_adapters:
        command += ["--lora-rank", str(_LORA["lora_rank"]), "--lora-push", push]
    if push == "adapter" and adapter_flags(name):
        command += ["--exclude-modules", *WITHOUT_MLP]
    with open(folder / "output.txt", "wb") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
    row: dict[str, Any] = {"family": family, "pipeline": pipeline}
    if code:
        return row | {"why": f"exit status {code}: {folder / 'output.txt'}"}
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in metrics if "train/grad_norm" in line]
    row["push"] = max(line.get("sync/verify_logprob_diff", math.inf) for line in metrics)
    why = [] if row["push"] <= (ADAPTERS_BOUND if has_adapters else PUSH_BOUND) else ["a push"]
    if len(trained) != 3 or not all(line["train/grad_norm"] > 0 for line in trained):
        why.append("a step without a gradient")
    if pipeline == "on-policy":
        row["mean"] = max(line.get("train/logprob_diff_mean", math.inf) for line in trained)
        bound = DELTA_BOUND if family.startswith(_DELTA) else MEAN_BOUND
        why += [] if row["mean"] <= bound else ["engine against trainer"]
    return row | {"why": ", ".join(why)}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the runs")
    parser.add_argument("--only", default="", help="families whose name has this text")
    parser.add_argument("--pipelines", default="on-policy,one-step-off")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args(argv)
    rows_of = families() if LORA in options.only else [name for name in families() if LORA not in name]
    chosen = [name for name in rows_of if options.only in name]
    if not chosen:
        parser.error(f"--only {options.only}: no family has this text; give one of {', '.join(rows_of)}")
    out: Path = options.out.absolute()
    task = out / "task"
    write_quickstart(task, 0)
    write_rows(task / _PICTURES[0], picture_rows(64, random.Random(0)))
    rows = []
    print("| family | pipeline | push | engine against trainer | |\n|---|---|---|---|---|", flush=True)
    for family in chosen:
        for pipeline in options.pipelines.split(","):
            rows.append(run_family(family, pipeline, task, out / f"{family}-{pipeline}"))
            push, mean = (f"{rows[-1][key]:.1e}" if key in rows[-1] else "" for key in ("push", "mean"))
            print(f"| {family} | {pipeline} | {push} | {mean} | {rows[-1]['why']} |", flush=True)
    bad = sum(bool(row["why"]) for row in rows)
    print(f"{len(rows)} rows, {bad} out of bounds")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(bad > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
