"""Prove the weight push: every trainer layout into every set of engines, by every executor.

    python tools/push_matrix.py [--only TEXT] [--json FILE]

Tiny models in fp32 on this machine's CPU: real SGLang servers, Megatron ranks, gloo and shared memory, through the code
that `fusionrl train` pushes with. Before each push the trainers read weights that none of the engines holds, so that a
push that does nothing fails. After it every engine's log-probs are compared with transformers' under those weights and
with the trainers', and the checksum of every tensor on every engine rank with those of the checkpoint's files and of
the trainers. Exit code 1 where one differs. About 5 minutes on two cores.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import ray

from fusionrl.base.environment import extended_environment
from fusionrl.base.sockets import LOOPBACK
from fusionrl.config.config import Config
from fusionrl.config.model import WeightsGroup
from fusionrl.engines.engine import EngineSpec
from fusionrl.engines.http import call
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.plan import make_plan
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.runtime.actor_process import EngineWorker, ProcessSettings
from fusionrl.runtime.early_start import EarlyStart
from fusionrl.runtime.ray_cluster import actor_on, start_ray
from fusionrl.runtime.worker_actors import PolicyWorker
from fusionrl.weights.push import Push
from fusionrl.weights.verify import Verification, compare_checksums

BOUND = 1e-5  # of log-prob differences, in fp32
VOCAB = 500  # no multiple of 64, to which SGLang pads it
NUM_WEIGHTS = 3  # one more than engines that are pushed to at once: one set is new to all of them
EXECUTORS = [
    *(name for name in get_args(WeightsGroup.model_fields["update_weight_transport"].annotation) if name != "auto"),
    "delta",
]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {"qwen3": {}, "qwen3_moe": EXPERTS}
LAYOUTS: dict[str, TrainerLayout] = {
    "TP 1": TrainerLayout(1),
    "TP 2": TrainerLayout(2, tp=2),
    "PP 2": TrainerLayout(2, pp=2),
    "PP 2 · VPP 2": TrainerLayout(2, pp=2, vpp=2),
    "CP 2": TrainerLayout(2, cp=2),
    "DP 2": TrainerLayout(2),
    "EP 2": TrainerLayout(2, ep=2),
    "TP 2 · EP 2": TrainerLayout(2, tp=2, ep=2),
}
# Set → engines of it, as numbers into TP_SIZES.
ENGINES: dict[str, tuple[int, ...]] = {"1 × TP 1": (0,), "2 × TP 1": (0, 1), "1 × TP 2": (2,)}
TP_SIZES = (1, 1, 2)


@contextmanager
def cluster(architecture: str = "Qwen3ForCausalLM") -> Iterator[None]:
    """Ray as a run on a CPU starts it: actors and servers of models of `architecture` are forks of a nursery."""
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder, EarlyStart() as early_start:
        Path(folder, "config.json").write_text(json.dumps({"architectures": [architecture]}), encoding="utf-8")
        early_start.begin(Config.from_flat({"mode": "rl", "hf_checkpoint": folder}), "cpu")
        with extended_environment(env | early_start.environment()):
            start_ray("cpu", 1, address=None, dashboard=False)
        try:
            yield
        finally:
            ray.shutdown()


@dataclass(frozen=True)
class Row:
    """One layout and one set of engines."""

    model: str
    layout: str
    engines: str


def rows() -> list[Row]:
    """Every row; expert parallelism is for the model that has experts."""
    return [
        Row(model, layout, engines)
        for model in MODELS
        for layout, sizes in LAYOUTS.items()
        if sizes.ep == 1 or model == "qwen3_moe"
        for engines in ENGINES
    ]


class Rank(PolicyWorker):
    """A trainer rank's process that lives on from one layout to the next."""

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self, *args: Any) -> None:
        """Leave the layout before, and be what `PolicyWorker(*args)` is."""
        if self._sender is not None:
            self._sender.disconnect()
        if self._has_begun:
            self.shutdown()
        self._sender = self._disk = None
        self._has_begun = True
        super().__init__(*args)

    def read(self, folder: str) -> None:
        """Take the weights of a Hugging Face folder."""
        from fusionrl.models.hf_io import load_hf

        load_hf(folder, self.trained.chunks, self.shape)


def make_weights(model: str, folder: Path) -> tuple[list[Path], list[Any]]:
    """`NUM_WEIGHTS` random checkpoints of one model, and transformers' models of them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model, **(COMMON | MODELS[model]))
    config._attn_implementation = "eager"
    paths, models = [], []
    for seed in range(NUM_WEIGHTS):
        torch.manual_seed(seed)
        model_ = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for key, param in model_.named_parameters():
                if key.endswith("norm.weight"):
                    param.add_(0.2 * torch.randn_like(param))
                elif key.endswith("gate.weight"):
                    param.normal_(std=0.4)  # routers that choose clearly
        path = folder / f"{model}-{seed}"
        model_.save_pretrained(path)
        _save_tokenizer(path)
        paths.append(path)
        models.append(model_)
    return paths, models


def _save_tokenizer(path: Path) -> None:
    """Numbers as words: the engines are asked by token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1").save_pretrained(path)


class Bench:
    """Engines and trainer ranks of one model."""

    def __init__(self, model: str, folder: Path, engines: Sequence[int], server_args: dict[str, Any]) -> None:
        """Start the engines of the numbers `engines` with further fields of SGLang's ServerArgs, and two ranks."""
        self.paths, self.models = make_weights(model, folder)
        self.shape: ModelShape = read_model_shape(self.paths[0])
        self.folder, self.version = folder, 0
        self.local_copy = str(folder / "local-copy")  # of the engines' host, by files
        self.layout: TrainerLayout | None = None
        self.holds = dict.fromkeys(engines, 0)  # engine → number of the weights that it has
        self.engines = {
            index: actor_on(EngineWorker, None, None, env=None, max_concurrency=8).remote(
                self._spec(index, server_args), str(folder / f"engine-actor-{index}.log"), ProcessSettings(0o022)
            )
            for index in engines
        }
        self.ranks = [actor_on(Rank, None, None, env=None).remote() for _ in range(2)]
        started = ray.get([engine.start.remote() for engine in self.engines.values()])
        self.urls = dict(zip(self.engines, started, strict=True))

    def _spec(self, index: int, server_args: dict[str, Any]) -> EngineSpec:
        return EngineSpec(
            index=index,
            model_path=str(self.paths[0]),
            device="cpu",
            dtype="float32",
            tp_size=TP_SIZES[index],
            gpu_ids=(),
            host=LOOPBACK,
            api_key=None,
            log_dir=str(self.folder),
            seed=1,
            start_timeout_s=1200.0,
            server_args={"max_total_tokens": 4096, "max_running_requests": 16} | server_args,
        )

    def lay_out(self, layout: TrainerLayout) -> None:
        """Make the trainers ones of this layout, if they are not."""
        if layout == self.layout:
            return
        self.layout = layout
        config = self._config(layout)
        plan = make_plan(config, self.shape, device="cpu", num_prompts=0)
        self.trainers = self.ranks[: layout.world_size]
        logs = [str(self.folder / f"trainer-{rank}.log") for rank in range(layout.world_size)]
        ray.get(
            [
                trainer.begin.remote(config, plan, rank, str(self.folder), rank, LOOPBACK, log)
                for rank, (trainer, log) in enumerate(zip(self.trainers, logs, strict=True))
            ]
        )
        address, port = ray.get(self.trainers[0].node_address.remote())
        ray.get([trainer.setup.remote(address, port) for trainer in self.trainers])

    def _config(self, layout: TrainerLayout) -> Config:
        return Config.from_flat(
            {
                "hf_checkpoint": str(self.paths[0]),
                "device": "cpu",
                "precision": "fp32",
                "actor_num_gpus_per_node": layout.world_size,
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
                "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
                "context_parallel_size": layout.cp,
                "expert_model_parallel_size": layout.ep,
                # Without expert parallelism experts are divided as the rest is.
                "expert_tensor_parallel_size": 1 if layout.ep > 1 else None,
                "train_num_threads": 1,
                "no_save": True,
                "update_weight_buffer_size": 2**17,  # several buckets
                "update_weight_transport": "disk",  # of files; `push` chooses
                "update_weight_mode": "delta",
                "update_weight_local_checkpoint_dir": self.local_copy,
            }
        )

    def push(self, engines: Sequence[int], executor: str, pause_mode: str = "abort") -> int:
        """Push weights that none of `engines` holds; their number."""
        which = next(i for i in range(NUM_WEIGHTS) if i not in {self.holds[index] for index in engines})
        ray.get([trainer.read.remote(str(self.paths[which])) for trainer in self.trainers])
        node = ray.get_runtime_context().get_node_id()
        self.targets = [
            EngineTarget(index, self.engines[index], node, tuple(range(TP_SIZES[index]))) for index in engines
        ]
        self.version += 1
        push = Push(self.trainers, self.targets, self.version, 600.0)
        if executor in ("disk", "delta"):
            if executor == "disk":  # without a copy on the engines' host there is nothing to apply a delta to
                ray.get(self.targets[0].handle.drop_local_copy.remote(self.local_copy))
            pushed = push.by_disk(self.local_copy, pause_mode, keep_files=False)
            assert executor == "disk" or pushed["sync/full_hosts"] == 0, "the delta was not applied"
        else:
            push.from_memory([], executor, pause_mode)
        self.holds |= dict.fromkeys(engines, which)
        return which

    def check(self, which: int) -> dict[str, float]:
        """Compare the engines of the last push with the weights of number `which` and with the trainers.

        Returns:
            transformers, trainers   largest |log-prob difference| to them of any token
            tensors                  checksums compared with those of the checkpoint's files, and with the trainers'

        Raises:
            WeightMismatch: log-probs or checksums are not the trainers'.
            AssertionError: checksums are not those of the files.
        """
        from safetensors.torch import load_file

        from fusionrl.weights.checksums import CPU_MULTIPLE, engine_checksums

        verified = self.verify([target.index for target in self.targets])
        files = load_file(self.paths[which] / "model.safetensors")
        num_tensors, difference = 0, 0.0
        for target in self.targets:
            expected = engine_checksums(files.items(), self.shape, target.tp_size, mlp_multiple=CPU_MULTIPLE)
            checksums = ray.get(target.handle.weight_checksums.remote())
            for want, have in zip(expected, checksums, strict=True):
                assert compare_checksums(want, have) == [], compare_checksums(want, have)
                num_tensors += len(want)
            tokens, log_probs, versions = self.ask(target.index)
            assert versions == {str(self.version)}, versions
            difference = max(difference, float(np.abs(log_probs - self.log_probs(which, tokens)).max()))
        assert num_tensors == verified["sync/verify_tensors"]
        return {
            "transformers": difference,
            "trainers": verified["sync/verify_logprob_diff_max"],
            "tensors": num_tensors,
        }

    def verify(self, indices: Sequence[int], is_exact: bool = True, version: int | None = None) -> dict[str, float]:
        """Take the three steps of a `Verification` with the engines `indices`; raises `WeightMismatch` as it does."""
        verification = Verification(
            self.trainers,
            [target for target in self.targets if target.index in indices],
            [self.urls[index] for index in indices],
            api_key=None,
            vocab_size=VOCAB,
            version=version or self.version,
            temperature=1.0,
            tolerance=BOUND,
            is_exact=is_exact,
        )
        verification.compare_tensors()
        verification.ask_probe()
        return verification.judge()

    def ask(self, index: int, num_tokens: int = 16) -> tuple[list[list[int]], np.ndarray, set[str]]:
        """Four answers of an engine: their tokens after the prompts', all log-probs, and the versions they are of."""
        params = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        payload = {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True}
        answers = call("POST", self.urls[index] + "/generate", payload, api_key=None, timeout_s=600.0)
        log_probs = [entry[0] for answer in answers for entry in answer["meta_info"]["output_token_logprobs"]]
        versions = {answer["meta_info"]["weight_version"] for answer in answers}
        return [answer["output_ids"] for answer in answers], np.array(log_probs), versions

    def log_probs(self, which: int, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """transformers' log-probs of `tokens` after each prompt, under the weights of number `which`."""
        import torch

        rows = []
        for prompt, answer in zip(PROMPTS, tokens, strict=True):
            with torch.no_grad():
                logits = self.models[which](torch.tensor([prompt + list(answer)])).logits[0, len(prompt) - 1 : -1]
            rows.append(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].numpy())
        return np.concatenate(rows)

    def close(self) -> None:
        """End the engines and the ranks."""
        ray.get([engine.shutdown.remote() for engine in self.engines.values()])
        for actor in [*self.engines.values(), *self.ranks]:
            ray.kill(actor)


PROMPTS = [np.random.default_rng(length).integers(0, VOCAB, length).tolist() for length in (2, 7, 19, 40)]


@contextmanager
def bench(
    model: str, folder: Path, engines: Sequence[int], server_args: dict[str, Any] | None = None
) -> Iterator[Bench]:
    """A `Bench` in a running Ray; ended with all its processes."""
    bench = Bench(model, folder, engines, server_args or {})
    try:
        yield bench
    finally:
        bench.close()


def run(chosen: Sequence[Row], report: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Push and check `chosen`, by every executor; return a dictionary for each row, which `report` gets too."""
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in dict.fromkeys(row.model for row in chosen):
            model_rows = [row for row in chosen if row.model == model]
            engines = sorted({index for row in model_rows for index in ENGINES[row.engines]})
            with bench(model, Path(scratch), engines) as stack:
                for layout in dict.fromkeys(row.layout for row in model_rows):
                    stack.lay_out(LAYOUTS[layout])
                    for row in (row for row in model_rows if row.layout == layout):
                        entry: dict[str, Any] = vars(row) | {"holds": True}
                        for executor in EXECUTORS:
                            checked = stack.check(stack.push(ENGINES[row.engines], executor))
                            entry[executor] = checked
                            entry["holds"] &= max(checked["transformers"], checked["trainers"]) <= BOUND
                        results.append(entry)
                        report(entry)
    return results


HEAD = (
    "| model | trainers | engines | tensors | "
    + " | ".join(EXECUTORS)
    + " | within 1e-5 |\n"
    + "|---" * (5 + len(EXECUTORS))
    + "|"
)


def line(entry: dict[str, Any]) -> str:
    """One row of the table."""
    cells = [f"{entry[name]['transformers']:.1e}, {entry[name]['trainers']:.1e}" for name in EXECUTORS]
    tensors = f"{entry[EXECUTORS[0]]['tensors']:.0f}"
    parts = [entry["model"], entry["layout"], entry["engines"], tensors, *cells, "yes" if entry["holds"] else "NO"]
    return "| " + " | ".join(parts) + " |"


def summary(results: Sequence[dict[str, Any]]) -> str:
    """The largest differences of all, and what was counted."""
    cells = [entry[name] for entry in results for name in EXECUTORS]
    return (
        f"{len(cells)} pushes; largest log-prob difference of a token to transformers"
        f" {max(cell['transformers'] for cell in cells):.1e}, to the trainers"
        f" {max(cell['trainers'] for cell in cells):.1e}; {sum(cell['tensors'] for cell in cells):.0f} tensors on"
        " engine ranks, all equal by checksum to the checkpoint's and to the trainers'."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="rows whose model, trainers or engines contain this text")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    chosen = [row for row in rows() if not options.only or options.only in f"{row.model}, {row.layout}, {row.engines}"]
    if not chosen:
        parser.error(f"--only {options.only}: no row has that text")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    start = time.perf_counter()
    print(HEAD)
    with cluster():
        results = run(chosen, lambda entry: print(line(entry), flush=True))
    print(f"\n{summary(results)} {time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(entry["holds"] for entry in results) else 1


if __name__ == "__main__":
    sys.exit(main())
