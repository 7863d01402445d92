"""Evaluation sets: answered by the engines and scored, or in --mode sft made into shards for a validation loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from fusionrl.buffer.eval_metrics import eval_metrics, eval_set_metrics
from fusionrl.buffer.eval_versions import check_one_version
from fusionrl.buffer.hook_border import HookBorder
from fusionrl.buffer.rollout_functions import RolloutFunctions
from fusionrl.buffer.train_shards import take_shards
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import EvalSet, eval_sets
from fusionrl.data.prompts import PromptColumns, load_conversations
from fusionrl.data.train_batch import TrainShard
from fusionrl.observe.json_values import to_jsonable, write_atomically
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.plan.batch import BatchPlan
from fusionrl.plan.plan import Plan
from fusionrl.rewards.dispatch import counting_lost
from fusionrl.rollout.sft_rollout import to_sft_sample
from fusionrl.rollout.types import EvalResult, as_eval_output


class Evaluation:
    """Evaluates, and writes the samples and eval/<step>.json."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        border: HookBorder,
        functions: RolloutFunctions,
        writer: RolloutWriter,
        run_dir: Path,
        attempt: int,
    ) -> None:
        self._config, self._plan, self._border, self._functions = config, plan, border, functions
        self._writer, self._run_dir, self._attempt = writer, run_dir, attempt
        self._sets: list[EvalSet] = eval_sets(border.args())

    def run(self, rollout_id: int, pushed_version: int | None = None) -> dict[str, float]:
        """Evaluate on every set; returns eval/<set>/….

        pushed_version  of the weights that the engines have; None: nothing was pushed to them

        Raises:
            HookError, ValueError: with the flag concerned.
            MixedVersions: the samples, which are written, are not all of that version.
        """
        with counting_lost() as lost:
            result = as_eval_output(self._functions.evaluate(self._border.eval_args(), rollout_id))
        for name, set_result in result.data.items():
            rows = (sample.to_row() for sample in set_result.get("samples", []))
            self._writer.write(rollout_id, self._attempt, rows, kind=f"eval-{name}")
        version = check_one_version(result.data, pushed_version, rollout_id)
        self._write_summary(rollout_id, result.data)
        log = self._border.hook("custom_eval_rollout_log_function_path")
        itself = log is not None and log(rollout_id, self._border.eval_args(), result.data, result.metrics)
        return {
            **({} if itself else eval_metrics(result.data)),
            **({} if version is None else {"eval/weight_version": float(version)}),
            **{f"eval/reward_{reason}": float(count) for reason, count in lost.items()},
            **result.metrics,
        }

    def _write_summary(self, rollout_id: int, data: Mapping[str, EvalResult]) -> None:
        """Write eval/<step>.json: each set's metrics, and the settings that they were found with (null: a user's)."""
        settings = {eval_set.name: eval_set.model_dump() for eval_set in self._sets}
        sets = {
            name: {"metrics": eval_set_metrics(name, set_result), "settings": settings.get(name)}
            for name, set_result in data.items()
        }
        folder = self._run_dir / "eval"
        folder.mkdir(exist_ok=True)
        summary = to_jsonable({"step": rollout_id, "attempt": self._attempt, "sets": sets})
        write_atomically(folder / f"{rollout_id}.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def validation_shards(self, put: Callable[[TrainShard], object]) -> dict[str, list[object]]:
        """--mode sft: set → one shard a rank, for `PolicyTrainer.evaluate_loss`."""
        assert self._plan.balance is not None and self._plan.batch is not None
        shards, args = {}, self._border.args()
        for eval_set in self._sets:
            columns = PromptColumns(eval_set.input_key, eval_set.label_key, eval_set.metadata_key, eval_set.tool_key)
            samples = load_conversations(eval_set.path, columns, f"--eval-prompt-data {eval_set.name}").samples
            for index, sample in enumerate(samples):
                sample.index = sample.group_index = index
            samples = [to_sft_sample(args, sample) for sample in samples]
            zeros, count = [0.0] * len(samples), len(samples)
            batch = BatchPlan(count, 1, 1, count, self._plan.batch.dp_size)
            built = take_shards(samples, zeros, zeros, batch, self._plan.balance, rollout_id=-1)
            shards[eval_set.name] = [put(shard) for shard in built]
        return shards
