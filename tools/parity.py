"""Prove that every parallel layout computes the same thing: one rank against many, and one rank against transformers.

    python tools/parity.py [--only TEXT] [--max-ranks N] [--logits] [--bitwise] [--json FILE]

Tiny models in fp32 on this machine's CPU, gloo between processes. A row is one layout, trained for three steps on
packed sequences of different lengths and compared with one rank: the loss and the gradient norm of each step, and at
the first step the gradient of every tensor under its Hugging Face name. One rank's first gradients are compared with
those of transformers' autograd. Models that see have no image in the second step; the log-probs of every layout are
compared with transformers'. With --logits, instead: every family's logits against transformers', packed and not, at
one rank and divided. Exit code 1 where a bound is passed. Two to six minutes on two cores.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.config.config import Config, PassThrough
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.models.trainable import PEFT_PREFIX, AdapterSpec, adapter_rules
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trained_parts import adapters_of
from tests.tiny_vision import make_tiny_vlm
from tests.trainer.local_ranks import LocalRanks
from tests.trainer.trainer_worker import adapter_value, draw_adapters
from tests.trainer.vision_samples import VisionSamples
from tools.parity_rows import COMMON, KNOWN_AS, LORA, MODELS, ROWS, SEEING, Row, without_adapters

LOSS_BOUND, NORM_BOUND, GRADIENT_BOUND, LOG_PROB_BOUND = 1e-5, 1e-4, 1e-4, 1e-5
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
STEPS = 3
# Layouts that live processes run before they are replaced: each group of process groups keeps descriptors open.
LAYOUTS_PER_PROCESS = 8


def make_model(name: str, folder: Path) -> Any:
    """A random model saved to `folder`, with routers that choose clearly and norms that are not all ones."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.trainer import hf_models  # noqa: F401 (models that are registered there)

    name = without_adapters(name)
    family = name.split()[0]
    if name in SEEING:
        return make_tiny_vlm(folder, family, **SEEING[name])
    config = AutoConfig.for_model(
        KNOWN_AS.get(family, family), **(COMMON | {"tie_word_embeddings": False} | MODELS[name])
    )
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if key.endswith("norm.weight"):
                param.add_(0.2 * torch.randn_like(param))
            elif key.endswith(("bias", "sinks")):
                param.normal_(std=0.1)
            elif key.endswith(
                ("A_log", "dt_bias")
            ):  # transformers' own make some gates so small that gradients are noise
                param.copy_(torch.rand_like(param) - 0.5)
            elif key.endswith(("gate.weight", "router.weight")):
                param.normal_(std=0.4)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": family}))
    return model


def checkpoint_gradients(model: Any) -> dict[str, np.ndarray]:
    """Checkpoint name → gradient."""
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: grad.numpy().copy() for name, grad in checkpoint_views(model, grads).items()}


def checkpoint_views(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Checkpoint name → view of `tensors`, which have the names of transformers' parameters.

    In memory transformers keeps a layer's experts in two tensors, on disk one by one.
    """
    views: dict[str, Any] = {}
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.")  # of a model that sees
        head, _, tail = name.partition(".mlp.experts.")
        if not tail or model.config.model_type == "gpt_oss":  # which keeps them in two tensors on disk, too
            views[name.replace(".mlp.gate.", f".{block}.gate.")] = tensor
            continue
        for expert, part in enumerate(tensor):
            prefix = f"{head}.{block}.experts.{expert}"
            if tail == "down_proj":
                views[f"{prefix}.{down}.weight"] = part
            else:
                views[f"{prefix}.{gate}.weight"], views[f"{prefix}.{up}.weight"] = part.chunk(2)
    return views


class MergedAdapters:
    """Adapters with the values of `adapter_value`, added to a transformers model; their gradients follow from its own.

    Independent of how families divide and join weights: a module's W is W + s B A.
    """

    def __init__(self, model: Any, shape: ModelShape, spec: AdapterSpec) -> None:
        import torch

        self.scale, self.model = spec.scale, model
        rules = adapter_rules(shape, spec).values()
        self.matrices = {
            name: torch.nn.Parameter(torch.from_numpy(adapter_value(name, sizes)))
            for rule in rules
            for name, sizes in rule.hf.items()
        }
        weights = checkpoint_views(model, {name: param.detach() for name, param in model.named_parameters()})
        self.weights = {
            module: weights[module.removeprefix(PEFT_PREFIX) + ".weight"]
            for module in (name.removesuffix(LORA_A) for name in self.matrices if name.endswith(LORA_A))
        }
        self.before = {module: weight.clone() for module, weight in self.weights.items()}
        self.merge()

    def merge(self) -> None:
        """Let the model compute with the values that the matrices have now."""
        for module, weight in self.weights.items():
            added = self.matrices[module + LORA_B].detach() @ self.matrices[module + LORA_A].detach()
            weight.copy_(self.before[module] + self.scale * added)

    def take_gradients(self) -> dict[str, np.ndarray]:
        """Give the matrices their gradients, by those of the model's weights; returns PEFT's name → gradient."""
        grads = checkpoint_gradients(self.model)
        for module in self.weights:
            of_weight = self.scale * grads[module.removeprefix(PEFT_PREFIX) + ".weight"]
            a, b = self.matrices[module + LORA_A], self.matrices[module + LORA_B]
            a.grad, b.grad = map(a.new_tensor, (b.detach().numpy().T @ of_weight, of_weight @ a.detach().numpy().T))
        return {name: matrix.grad.numpy() for name, matrix in self.matrices.items()}


class Batch:
    """The step that all layouts train on: 16 sequences of different lengths, each with a prompt and a response."""

    def __init__(self, count: int = 16) -> None:
        random = np.random.default_rng(1)
        self.total = random.integers(12, 60, count).astype(np.int32)
        self.response = np.maximum(self.total // 2, 1).astype(np.int32)
        self.tokens = [random.integers(0, COMMON["vocab_size"], n).astype(np.int32) for n in self.total]

    def shards(self, dp: int, step: int = 0) -> list[TrainShard]:
        """Dealt out in turn over `dp` ranks, four micro-batches each; the same in every step."""
        counts = int(self.response.sum()), len(self.total)
        return [self._shard(list(range(rank, len(self.total), dp)), counts) for rank in range(dp)]

    def _shard(self, ids: list[int], counts: tuple[int, int]) -> TrainShard:
        micro = [list(part) for part in np.array_split(np.arange(len(ids)), 4)]
        ones = np.ones(int(self.response[ids].sum()), np.float32)
        return TrainShard(
            rollout_id=0,
            total_lengths=self.total[ids],
            response_lengths=self.response[ids],
            fields={
                "tokens": np.concatenate([self.tokens[i] for i in ids]),
                "loss_mask": ones,
                "rewards": np.zeros(len(ids), np.float32),
                "raw_rewards": np.zeros(len(ids), np.float32),
                "sample_index": np.array(ids),
                "group_index": np.array(ids),
                "truncated": np.zeros(len(ids), np.bool_),
            },
            steps=[TrainStep([[int(i) for i in part] for part in micro], *counts)],
        )

    def reference_gradients(self, model: Any, folder: Path) -> tuple[float, dict[str, np.ndarray]]:
        """(loss, gradients under checkpoint names) by transformers' autograd, one sequence at a time."""
        import torch

        total = torch.zeros(())
        for tokens, response in zip(self.tokens, self.response, strict=True):
            ids = torch.tensor(tokens, dtype=torch.long)
            log_probs = model(ids[None]).logits[0].log_softmax(-1)[-int(response) - 1 : -1]
            total = total - log_probs.gather(-1, ids[-int(response) :, None]).sum()
        loss = total / int(self.response.sum())
        loss.backward()
        return float(loss), checkpoint_gradients(model)


class SeeingBatch:
    """The same of a model that sees: texts, and texts with images."""

    def __init__(self, family: str) -> None:
        self.samples = VisionSamples(family)

    def shards(self, dp: int, step: int = 0) -> list[TrainShard]:
        if step != 1:
            return self.samples.shards(dp, micro=-(-len(self.samples) // (4 * dp)))
        texts = [i for i, spans in enumerate(self.samples.spans) if not spans]
        own = [[[i] for i in texts[rank::dp]] for rank in range(dp)]
        return [self.samples.shard([micro], [self.samples.count(texts)]) for micro in own]

    def reference_gradients(self, model: Any, folder: Path) -> tuple[float, dict[str, np.ndarray]]:
        self.log_probs, loss, gradients = self.samples.reference(folder, model)
        return loss, gradients

    def scores_differ(self, ranks: LocalRanks, layout: TrainerLayout) -> float:
        """Largest absolute difference of a log-prob to transformers'."""
        scores = ranks.on_shards("score", self.shards(layout.dp))
        own = [(scores[layout.ranks_of_dp(dp)[0]], self.log_probs[dp :: layout.dp]) for dp in range(layout.dp)]
        return max(float(np.abs(got - want).max()) for pair in own for got, want in zip(*pair, strict=True))


def batch_of(name: str) -> Batch | SeeingBatch:
    """Return the samples that the model is trained on."""
    return SeeingBatch(name.split()[0]) if without_adapters(name) in SEEING else Batch()


@dataclass
class Result:
    """The results of one layout."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    seconds: float
    log_probs: float | None  # their largest difference to transformers', of models that see


def first_gradients(actor: Any) -> dict[str, np.ndarray] | None:
    """Gradients of the last step, on rank 0."""
    from tests.trainer.trainer_worker import gradients

    whole = gradients(actor)
    return whole if actor.rank == 0 else None


def all_logits(actor: Any, shard: TrainShard, groups: list[list[int]]) -> list[np.ndarray] | None:
    """[tokens, vocabulary] of each micro-batch in `groups`, without each sample's last token; on the last stage."""
    import dataclasses

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from fusionrl.trainer.micro_batches import build_micro_batch
    from fusionrl.trainer.score import forward_log_probs

    options = actor.batch_options
    batches = [dataclasses.replace(build_micro_batch(shard, ids, None, options), selection=None) for ids in groups]
    outputs = forward_log_probs(actor.trained, batches)  # without a selection the model gives logits
    rows, group = [], parallel_state.get_tensor_model_parallel_group()
    for ids, batch, output in zip(groups, batches, outputs, strict=False):
        parts = [torch.empty_like(output) for _ in range(group.size())]
        dist.all_gather(parts, output.contiguous(), group=group)
        logits = torch.cat(parts, dim=-1)[0, :, : actor.shape.vocab_size]
        # Where each sequence is padded, they stand apart; else one follows the other.
        fed, padded = [int(shard.total_lengths[i]) - 1 for i in ids], batch.layout.lengths
        starts = np.cumsum([0, *(padded if len(padded) == len(ids) else fed)])
        rows.append(torch.cat([logits[start : start + n] for start, n in zip(starts, fed, strict=False)]).numpy())
    return rows or None


def run_logits(models: Sequence[str], report: Any, shared: LocalRanks | None = None) -> list[dict[str, Any]]:
    """Largest absolute difference to transformers' logits: a dictionary for each model and layout.

    `shared` are two processes to run in; without them each model gets its own.
    """
    import torch

    results: list[dict[str, Any]] = []
    batch = Batch(8)
    (shard,) = batch.shards(1)
    packings = {"packed": [[0, 1, 2, 3], [4, 5, 6, 7]], "alone": [[i] for i in range(8)]}
    with tempfile.TemporaryDirectory() as scratch:
        for name in models:
            folder = Path(scratch) / name.replace(" ", "-")
            model, bound = make_model(name, folder), read_model_shape(folder).logit_bound
            with torch.no_grad():
                want = [model(torch.tensor(t[:-1], dtype=torch.long)[None]).logits[0].numpy() for t in batch.tokens]
            has_experts = any("experts" in key for key, _ in model.named_parameters())
            rows = [Row(name, 1), Row(name, 2, {"tp": 2}), Row(name, 2, {"pp": 2})]
            rows += [Row(name, 2, {"ep": 2})] if has_experts else []
            ranks = shared or LocalRanks(2)
            try:
                for row in rows:
                    ranks.start(trainer_config(folder, row), row.layout)
                    entry: dict[str, Any] = {"model": name, "layout": row.name or "one rank", "ranks": row.world}
                    for packing, groups in packings.items():
                        answers = ranks.run(all_logits, shard, groups)
                        got = [answer for answer in answers if answer is not None]
                        expected = [np.concatenate([want[i] for i in ids]) for ids in groups]
                        entry[packing] = max(
                            float(np.abs(g - e).max()) for answer in got for g, e in zip(answer, expected, strict=True)
                        )
                    entry["holds"] = max(entry["packed"], entry["alone"]) <= bound
                    results.append(entry)
                    report(entry)
            finally:
                if ranks is not shared:
                    ranks.close()
    return results


def trainer_config(folder: Path, row: Row) -> Config:
    """fp32, one thread a rank, plain supervised loss."""
    values = {"mode": "sft", "hf_checkpoint": str(folder), "precision": "fp32", "train_num_threads": 1}
    values |= {"multimodal_keys": {"image": "images"}} if without_adapters(row.model) in SEEING else {}
    values |= LORA.get(row.model, {})
    passthrough = PassThrough(transformer=row.transformer, ddp=row.ddp)
    return Config.from_flat(values | {"lr": 1e-3, "clip_grad": 1.0} | row.flags, passthrough)


def measure(ranks: LocalRanks, folder: Path, row: Row, batch: Batch | SeeingBatch) -> Result:
    layout = row.layout
    ranks.start(trainer_config(folder, row), layout)
    if row.model in LORA:
        ranks.run(draw_adapters)
    log_probs = batch.scores_differ(ranks, layout) if isinstance(batch, SeeingBatch) else None
    losses, norms, gradients = [], [], {}
    start = time.perf_counter()
    for step in range(STEPS):
        metrics = ranks.train(batch.shards(layout.dp, step), layout, step)
        losses.append(metrics["train/loss"])
        norms.append(metrics["train/grad_norm"])
        if step == 0:
            gradients = ranks.run(first_gradients)[0]
    return Result(losses, norms, gradients, (time.perf_counter() - start) / STEPS, log_probs)


def relative(got: Sequence[float], want: Sequence[float]) -> float:
    """Largest relative difference."""
    return max(abs(g - w) / abs(w) for g, w in zip(got, want, strict=True))


def worst_tensor(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> tuple[float, str]:
    """(largest relative L2 difference, name of that tensor); infinite where the names differ."""
    if set(got) != set(want):
        return math.inf, sorted(set(got) ^ set(want))[0]
    differences = {}
    for name, tensor in want.items():
        norm = float(np.linalg.norm(tensor))
        difference = float(np.linalg.norm(got[name] - tensor))
        differences[name] = difference / norm if norm else (math.inf if difference else 0.0)
    name = max(differences, key=lambda key: differences[key])
    return differences[name], name


def scaled(gradients: dict[str, np.ndarray], norm: float, limit: float = 1.0) -> dict[str, np.ndarray]:
    """Gradients clipped to `limit` as Megatron does it."""
    factor = min(limit / (norm + 1e-6), 1.0)
    return {name: tensor * factor for name, tensor in gradients.items()}


def run(rows: Sequence[Row], report: Any) -> list[dict[str, Any]]:
    """Measure `rows`; a dictionary each, the one-rank rows against transformers first."""
    results: list[dict[str, Any]] = []
    ranks, size, used = None, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        batches, references = {model: batch_of(model) for model in {row.model for row in rows}}, {}
        folders = {model: Path(scratch) / model.replace(" ", "-") for model in dict.fromkeys(row.model for row in rows)}
        order = [Row(model, 1) for model in folders] + sorted(rows, key=lambda row: row.world)
        try:
            for row in order:
                if ranks is None or row.world > size or used == LAYOUTS_PER_PROCESS:
                    if ranks is not None:
                        ranks.close()
                    ranks, size, used = LocalRanks(row.world), row.world, 0
                used += 1
                batch, folder = batches[row.model], folders[row.model]
                if row.world == 1:
                    model = make_model(row.model, folder)
                    shape = read_model_shape(folder, sees=isinstance(batch, SeeingBatch))
                    spec = adapters_of(trainer_config(folder, row), shape)
                    merged = None if spec is None else MergedAdapters(model, shape, spec)
                    loss, gradients = batch.reference_gradients(model, folder)
                    gradients = gradients if merged is None else merged.take_gradients()
                got = measure(ranks, folder, row, batch)
                entry: dict[str, Any] = {"model": row.model, "ranks": row.world, "seconds_per_step": got.seconds}
                if row.world == 1:
                    references[row.model] = got
                    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
                    tensor = worst_tensor(got.gradients, scaled(gradients, norm))
                    entry |= {"layout": "one rank, against transformers"}
                    entry |= {"loss": relative(got.losses[:1], [loss]), "norm": relative(got.norms[:1], [norm])}
                else:
                    want = references[row.model]
                    tensor = worst_tensor(got.gradients, want.gradients)
                    entry |= {"layout": row.name, "loss": relative(got.losses, want.losses)}
                    entry |= {"norm": relative(got.norms, want.norms)}
                entry |= {"gradient": tensor[0], "worst": tensor[1], "tensors": len(got.gradients)}
                entry["holds"] = (
                    entry["loss"] <= LOSS_BOUND and entry["norm"] <= NORM_BOUND and entry["gradient"] <= GRADIENT_BOUND
                )
                if got.log_probs is not None:
                    entry["log_probs"] = got.log_probs
                    entry["holds"] &= got.log_probs <= LOG_PROB_BOUND
                results.append(entry)
                report(entry)
        finally:
            if ranks is not None:
                ranks.close()
    return results


def line(entry: dict[str, Any]) -> str:
    """One row of the table."""
    log_probs = f" log-probs {entry['log_probs']:.1e} |" if "log_probs" in entry else ""
    return (
        f"| {entry['model']} | {entry['layout']} | {entry['ranks']} | {entry['loss']:.1e} | {entry['norm']:.1e} "
        f"| {entry['gradient']:.1e} | {entry['tensors']} | {'yes' if entry['holds'] else 'NO: ' + entry['worst']} |"
        f"{log_probs}"
    )


def logits_line(entry: dict[str, Any]) -> str:
    """One row of the table of logits."""
    return (
        f"| {entry['model']} | {entry['layout']} | {entry['ranks']} | {entry['packed']:.1e} | {entry['alone']:.1e} "
        f"| {'yes' if entry['holds'] else 'NO'} |"
    )


LOGITS_HEAD = "| model | layout | ranks | packed | one sequence at a time | within bounds |\n|---|---|---|---|---|---|"
HEAD = (
    "| model | layout | ranks | loss | gradient norm | worst gradient tensor | tensors | within bounds |\n"
    "|---|---|---|---|---|---|---|---|"
)


def rows_with(text: str | None, max_ranks: int | None) -> list[Row]:
    """Return the rows whose model and layout contain `text`, of at most so many ranks; None: any."""
    return [
        row
        for row in ROWS
        if (not text or text in f"{row.model} {row.name}") and (max_ranks is None or row.world <= max_ranks)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="rows whose model or layout contains this text")
    parser.add_argument("--max-ranks", type=int, help="rows of at most so many ranks")
    parser.add_argument("--logits", action="store_true", help="compare logits with transformers'")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--bitwise", action="store_true", help="compute as with --bitwise of a run")
    options = parser.parse_args(argv)
    rows = rows_with(options.only, options.max_ranks)
    rows = [replace(row, flags=row.flags | {"bitwise": True}) for row in rows] if options.bitwise else rows
    models = [name for name in MODELS if not options.only or options.only in name]
    if not (models if options.logits else rows):
        parser.error(f"--only {options.only}: no row has that text")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    start = time.perf_counter()
    head, row_of = (LOGITS_HEAD, logits_line) if options.logits else (HEAD, line)
    print(head)
    if options.logits:
        results = run_logits(models, lambda entry: print(row_of(entry), flush=True))
    else:
        results = run(rows, lambda entry: print(row_of(entry), flush=True))
    failed = [entry for entry in results if not entry["holds"]]
    print(f"\n{len(results)} rows in {time.perf_counter() - start:.0f} s, {len(failed)} out of bounds")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
