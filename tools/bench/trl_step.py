"""Time the training step of GRPOTrainer, from TRL, on given prompts; the other side of tools/bench/step.py.

    bash scripts/setup-trl-env.sh
    .venv-trl/bin/python tools/bench/trl_step.py --model DIR --prompts FILE.jsonl

Runs in an environment of its own, so it imports nothing of fusionrl. Generation is transformers' own, as TRL
does it where no inference server is. Every completion has exactly --new-tokens tokens: the end token is
ignored, so both sides of the comparison do equal work. The reward costs nothing and differs within a group,
so that there is a gradient. Prints one JSON line; `seconds_per_step` holds every step, the first one (warm-up)
included.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

# Before torch is imported, which reads them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time the step of TRL's GRPOTrainer.")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines {"prompt": ...}')
    parser.add_argument("--num-prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--num-samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of every completion")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--steps", type=int, default=4, help="steps, the first one being warm-up")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights and arithmetic")
    return parser.parse_args()


def grpo_config(args: argparse.Namespace, folder: str) -> Any:
    """TRL's settings: one optimizer step a batch, and nothing logged or saved."""
    import torch
    import trl

    return trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=args.num_prompts * args.num_samples,
        num_generations=args.num_samples,
        max_completion_length=args.new_tokens,
        # An end token that is never sampled keeps every completion at full length.
        generation_kwargs={"min_new_tokens": args.new_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=args.steps,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )


def timed_steps(args: argparse.Namespace) -> list[float]:
    """Run the steps; return the seconds between begin and end of each, generation included."""
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(args.threads)
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    rows = [{"prompt": prompts[i % len(prompts)]} for i in range(args.num_prompts * args.steps)]
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    lengths: set[int] = set()
    seconds: list[float] = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """The share of distinct tokens of each completion."""
        lengths.update(map(len, completion_ids))
        return [len(set(ids)) / max(1, len(ids)) for ids in completion_ids]

    class Clock(TrainerCallback):
        def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
            seconds.append(time.perf_counter() - self.begin)

    with tempfile.TemporaryDirectory() as folder:
        trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
            reward_funcs=reward,
            args=grpo_config(args, folder),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            callbacks=[Clock()],
        ).train()
    if lengths != {args.new_tokens}:
        raise SystemExit(f"completions of {sorted(lengths)} tokens, not of {args.new_tokens}")
    return seconds


def main() -> None:
    """Run the steps, print the JSON line."""
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    seconds = timed_steps(args)
    import torch
    import transformers
    import trl

    facts = {
        "seconds_per_step": [round(s, 4) for s in seconds],
        "samples": args.num_prompts * args.num_samples,
        "new_tokens": args.new_tokens,
        "dtype": args.dtype,
        "threads": args.threads,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
