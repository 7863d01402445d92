"""Evaluation sets: answered by the engines and scored, or in --mode sft made into shards for a loss; their metrics."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fusionrl.algorithms.evaluation import Z_95, clustered_error, pass_at_k, powers_of_two
from fusionrl.buffer.collect import HookBorder, RolloutFunctions
from fusionrl.buffer.rollout_stages import by_adapter
from fusionrl.buffer.sample_files import write_pictures
from fusionrl.buffer.train_shards import TrainingSamples, take_shards
from fusionrl.config.eval_sets import eval_sets
from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import load_conversations
from fusionrl.data.sample import Sample
from fusionrl.data.sample_fields import UNKNOWN_VERSION, as_version, split_versions
from fusionrl.data.train_batch import TrainShard, attempt_shares, attempts_of
from fusionrl.observe.formats import to_jsonable, write_atomically
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.plan.balance import BatchPlan
from fusionrl.plan.plan import Plan
from fusionrl.rewards.dispatch import ACCURATE, counting_lost
from fusionrl.rollout.types import EvalResult, as_eval_output


def eval_metrics(data: Mapping[str, EvalResult]) -> dict[str, float]:
    """`eval_set_metrics` of each evaluation set, as eval/<set>/<name>."""
    metrics_by_set = {name: eval_set_metrics(name, result) for name, result in data.items()}
    return {f"eval/{name}/{metric}": value for name, of in metrics_by_set.items() for metric, value in of.items()}


METRICS = """
eval/<set>/reward | reward | Mean reward over all samples of the set.
eval/<set>/reward_ci95 | reward | Half the 95 % interval of this mean: 1.96 standard errors with prompts as clusters.
    | more than one prompt
eval/<set>/accuracy | share | Share of samples with a reward of at least 1.
eval/<set>/accuracy_ci95 | share | Half the 95 % interval of this share, in the same way. | more than one prompt
eval/<set>/pass@<k> | share | Chance that at least one of k samples of a prompt is right: the unbiased estimate 1 -
    C(n-c, k) / C(n, k) (2107.03374), mean over prompts; k = 1, 2, 4, … up to the samples of a prompt.
eval/<set>/num_prompts | prompts | Prompts of the set.
eval/<set>/num_samples | samples | Samples of the set.
eval/<set>/truncated_ratio | share | Share of responses cut off by the length limit.
eval/<set>/response_len | tokens | Mean length of the responses.
eval/<set>/response_len_median | tokens | Their median.
eval/<set>/response_len_max | tokens | The longest.
eval/weight_version | version | The version of the weights that sampled all tokens of the evaluation; one that would
    mix two ends the run.
eval/reward_timeout | samples | As rollout/reward_timeout, of all sets. | when it happens
eval/reward_crash | samples | As rollout/reward_crash, of all sets. | when it happens
eval/reward_error | samples | As rollout/reward_error, of all sets. | --reward-failure-value
"""


def eval_set_metrics(name: str, result: EvalResult) -> dict[str, float]:
    """Numbers about one evaluation set: what a rollout function returned under its name.

    reward, accuracy  means over all attempts, each with the mean of its samples' rewards; <name>_ci95 is half the
                      width of their 95 % interval, 1.96 standard errors over prompts. Attempts at one prompt are not
                      independent, so prompts are what is counted; a cluster bootstrap estimates the same error, but
                      with noise and a seed. Left out for one prompt.
    pass@k            mean over prompts of the unbiased estimate, for k = 1, 2, 4, … up to the samples of a prompt
    response_len      tokens of a response: mean, median and maximum; truncated_ratio: share cut off by the limit

    Without samples in `result` each reward counts as a prompt of its own.
    """
    rewards = np.asarray(result["rewards"], np.float64)
    if not len(rewards):
        raise ValueError(f"evaluation set {name!r} has no samples")
    samples = result.get("samples") or []
    groups = np.arange(len(rewards))
    if len(samples) == len(rewards):
        groups = np.array([-1 - i if s.group_index is None else s.group_index for i, s in enumerate(samples)])
        attempts = attempts_of(samples)
        _, firsts = np.unique(attempts, return_index=True)
        groups = groups[firsts]
        rewards = np.bincount(attempts, rewards * attempt_shares(attempts)).astype(np.float64)
    right = (rewards >= ACCURATE).astype(np.float64)
    out: dict[str, float] = {}
    for key, values in (("reward", rewards), ("accuracy", right)):
        out[key] = float(values.mean())
        error = clustered_error(values, groups)
        if error is not None:
            out[f"{key}_ci95"] = Z_95 * error
    prompts = [right[groups == group] for group in np.unique(groups)]
    for k in powers_of_two(min(len(prompt) for prompt in prompts)):
        out[f"pass@{k}"] = float(np.mean([pass_at_k(len(prompt), int(prompt.sum()), k) for prompt in prompts]))
    out["num_prompts"], out["num_samples"] = float(len(prompts)), float(len(rewards))
    if "truncated" in result:
        out["truncated_ratio"] = float(np.mean(result["truncated"]))
    if samples:
        lengths = np.array([s.response_length for s in samples])
        out["response_len"] = float(lengths.mean())
        out["response_len_median"], out["response_len_max"] = float(np.median(lengths)), float(lengths.max())
    return out


def eval_table(metrics: dict[str, float]) -> str:
    """The metrics of `eval_metrics` as a table for people, one line a set."""
    sets: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        if key.startswith("eval/") and key.count("/") == 2:
            sets.setdefault(key.split("/")[1], {})[key.split("/")[2]] = value
    sets = {name: values for name, values in sets.items() if "num_prompts" in values}
    passes = sorted(
        {key for values in sets.values() for key in values if key.startswith("pass@")}, key=lambda k: int(k[5:])
    )
    rows = [["set", "prompts", "samples", "accuracy", "reward", *passes, "length", "longest", "truncated"]]
    for name, values in sets.items():
        cells = [f"{values['num_prompts']:.0f}", f"{values['num_samples']:.0f}"]
        for key in ("accuracy", "reward"):
            error = f" ± {values[f'{key}_ci95']:.4f}" if f"{key}_ci95" in values else ""
            cells.append(f"{values[key]:.4f}{error}")
        columns = [(key, ".4f") for key in passes]
        columns += [("response_len", ".1f"), ("response_len_max", ".0f"), ("truncated_ratio", ".1%")]
        rows.append([name, *cells, *(format(values[key], form) if key in values else "-" for key, form in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([*lines, "±: half of the 95 % interval, 1.96 standard errors over prompts"])


# ------------------------------------------------------------------------------------------------ the evaluation
@dataclass
class Evaluation:
    """Evaluates, and writes the samples and eval/<step>.json."""

    plan: Plan
    border: HookBorder
    functions: RolloutFunctions
    writer: RolloutWriter
    run_dir: Path
    attempt: int
    adapters: tuple[str, ...] = ()

    def run(self, rollout_id: int, pushed_version: int | None = None) -> dict[str, float]:
        """Evaluate on every set; returns eval/<set>/….

        pushed_version  of the weights that the engines have; None: nothing was pushed to them

        Raises HookError or ValueError with the flag concerned; MixedVersions if the samples, which are written, are not
        all of that version.
        """
        with counting_lost() as lost:
            result = as_eval_output(self.functions.evaluate(self.border.args(is_evaluation=True), rollout_id))
        for name, set_result in result.data.items():
            rows = (sample.to_row() for sample in set_result.get("samples", []))
            write_pictures(self.writer, set_result.get("samples", []))
            self.writer.write(rollout_id, self.attempt, rows, kind=f"eval-{name}")
        version = check_one_version(result.data, pushed_version, rollout_id)
        self._write_summary(rollout_id, result.data)
        log = self.border.hook("custom_eval_rollout_log_function_path")
        itself = log is not None and log(rollout_id, self.border.args(is_evaluation=True), result.data, result.metrics)
        return {
            **({} if itself else eval_metrics(result.data)),
            **({} if version is None else {"eval/weight_version": float(version)}),
            **{f"eval/reward_{reason}": float(count) for reason, count in lost.items()},
            **result.metrics,
        }

    def _write_summary(self, rollout_id: int, data: Mapping[str, EvalResult]) -> None:
        """Write eval/<step>.json: each set's metrics, and the settings that they were found with (null: a user's)."""
        settings = {eval_set.name: eval_set.model_dump() for eval_set in eval_sets(self.border.args())}
        sets = {
            name: {"metrics": eval_set_metrics(name, set_result), "settings": settings.get(name)}
            for name, set_result in data.items()
        }
        folder = self.run_dir / "eval"
        folder.mkdir(exist_ok=True)
        summary = to_jsonable({"step": rollout_id, "attempt": self.attempt, "sets": sets})
        write_atomically(folder / f"{rollout_id}.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def validation_shards(self, put: Callable[[TrainShard], object]) -> dict[str, list[object]]:
        """--mode sft: set → one shard a rank, for `PolicyTrainer.evaluate_loss`; of several adapters, set-adapter."""
        from fusionrl.rollout.sft_rollout import to_sft_sample

        assert self.plan.balance is not None and self.plan.batch is not None
        shards, args = {}, self.border.args()
        for eval_set in eval_sets(args):
            columns = PromptColumns.of(args, keeps_messages=False).of_set(eval_set, keeps_messages=False)
            samples = load_conversations(eval_set.path, columns, f"--eval-prompt-data {eval_set.name}").samples
            for index, sample in enumerate(samples):
                sample.index = sample.group_index = index
            samples = [to_sft_sample(args, sample) for sample in samples]
            parts = by_adapter(samples, self.adapters)
            for adapter, members in parts.items():
                zeros, count = [0.0] * len(members), len(members)
                batch = BatchPlan(count, 1, 1, count, self.plan.batch.dp_size)
                chosen = TrainingSamples(members, zeros, zeros)
                built = take_shards(chosen, batch, self.plan.balance, rollout_id=-1, adapter=adapter)
                name = eval_set.name if adapter is None else f"{eval_set.name}-{adapter}"
                shards[name] = [put(shard) for shard in built]
        return shards


class MixedVersions(RuntimeError):
    """An evaluation has tokens of several versions of the weights, or of another one than the engines were pushed."""


def check_one_version(data: Mapping[str, EvalResult], pushed: int | None, step: int) -> int | None:
    """Return the version of the weights that sampled all tokens of an evaluation; None: unknown.

    pushed  the version that its engines have; None: nothing was pushed to them
    """
    first: tuple[int, str] | None = None if pushed is None else (pushed, "the engines were pushed")
    for name, result in data.items():
        for sample in result.get("samples") or []:
            for version in known_versions(sample):
                where = f"sample {sample.index} of set {name} has tokens of"
                if first is None:
                    first = version, where
                elif version != first[0]:
                    raise MixedVersions(
                        f"the evaluation after step {step} would mix two versions of the weights: {first[1]} version"
                        f" {first[0]}, and {where} version {version}"
                    )
    return None if first is None else first[0]


def known_versions(sample: Sample) -> list[int]:
    """Return the known versions of the weights that sampled its tokens, each once."""
    tokens, turns = split_versions(vars(sample)["weight_versions"])
    distinct = {int(version) for version in np.unique(np.asarray(tokens, np.int64))}
    return sorted((distinct | {as_version(turn) for turn in turns}) - {UNKNOWN_VERSION})
