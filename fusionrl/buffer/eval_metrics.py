"""Numbers about an evaluation, under slime's names."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusionrl.algorithms.evaluation import Z_95, clustered_error, pass_at_k, powers_of_two
from fusionrl.data.attempts import attempt_shares, attempts_of
from fusionrl.rollout.types import EvalResult

ACCURATE = 1.0  # a raw reward of at least this counts as a right answer


def eval_metrics(data: Mapping[str, EvalResult]) -> dict[str, float]:
    """`eval_set_metrics` of each evaluation set, as eval/<set>/<name>."""
    metrics_by_set = {name: eval_set_metrics(name, result) for name, result in data.items()}
    return {f"eval/{name}/{metric}": value for name, of in metrics_by_set.items() for metric, value in of.items()}


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
