"""`fusionrl diff RUN_A RUN_B`: the first step, sample, token and metric where two runs part, and flags that differ."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from fusionrl.base.imports import quiet
from fusionrl.base.wording import counted
from fusionrl.cli import refuse
from fusionrl.config.resume_differences import flag_differences
from fusionrl.observe.metrics import METRICS_FILE
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.observe.run_differences import difference_report
from fusionrl.observe.run_dir import last_config, last_config_file
from fusionrl.observe.show import find_run
from fusionrl.runtime.checkpoints import Checkpoints

EXIT_DIFFERENT = 1
# Where a run writes: two runs on one machine have to differ in them.
_OUTPUTS = {"save_hf", "save_debug_rollout_data", "reject_sampling_output"}


def run(argv: Sequence[str]) -> int:
    """Print the differences; returns the exit code: 0 equal, 1 different, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="fusionrl diff",
        description=__doc__,
        epilog="Exit code 0: equal in samples, metrics and weights, times left out; 1: they differ; 2: not comparable.",
    )
    parser.add_argument("one", metavar="RUN_A", help="run folder; or a folder of weights")
    parser.add_argument("other", metavar="RUN_B", help="the same kind of folder")
    parser.add_argument(
        "--weights",
        action="store_true",
        help="compare tensors too: of the models that the runs began with, and of checkpoints of the same step",
    )
    options = parser.parse_args(argv)
    try:
        folders = Path(options.one), Path(options.other)
        if all(map(_has_weights, folders)):
            lines, differ = _weight_lines([("weights", *folders)])
        else:
            lines, differ = _run_lines(_run(options.one), _run(options.other), options.weights)
    except (OSError, ValueError) as error:
        return refuse([str(error)])
    print("\n".join(lines))
    return EXIT_DIFFERENT if differ else 0


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in ("*.safetensors", ".metadata", "*/.metadata"))


def _run(name: str) -> Path:
    run = find_run(name)
    if last_config_file(run) is None and not (run / METRICS_FILE).is_file() and not list_rollouts(run):
        raise ValueError(f"{run} is not a run folder: it has no config.json, {METRICS_FILE} or rollouts")
    return run


def _run_lines(one: Path, other: Path, with_weights: bool) -> tuple[list[str], bool]:
    lines, differ = difference_report(one, other)
    configs = [last_config(run) or {} for run in (one, other)]
    changes = flag_differences(*configs)
    changed = [line for name, line in changes.items() if name not in _OUTPUTS]
    lines += [f"{counted(len(changed), 'flag')} differ{'s' * (len(changed) == 1)}" if changed else "no flag differs"]
    lines += [f"  {line}" for line in changed]
    if with_weights:
        of_weights, weights_differ = _weight_lines(_weight_folders((one, other), configs))
        lines, differ = lines + of_weights, differ or weights_differ
    return lines, differ


def _weight_folders(runs: tuple[Path, Path], configs: Sequence[Mapping[str, object]]) -> list[tuple[str, Path, Path]]:
    """Return what to compare, in the order in which it came about: its name, and the folders in both runs."""
    pairs = []
    starts = [_start_of(config) for config in configs]
    if starts[0] is not None and starts[1] is not None and starts[0] != starts[1]:
        pairs.append(("the models at the start", starts[0], starts[1]))
    folders = [_trained_folders(run) for run in runs]
    return pairs + [(name, folders[0][name], folders[1][name]) for name in sorted(folders[0].keys() & folders[1])]


def _trained_folders(run: Path) -> dict[str, Path]:
    """Return the folders of weights in a run's checkpoints: of the policy or its adapters, and of other models."""
    steps = Checkpoints(run / "checkpoints").finished()
    folders = [path.parent for step in steps for path in step.glob("*/.metadata")]
    return {f"{folder.parent.name}/{folder.name}": folder for folder in folders}


def _start_of(config: Mapping[str, object]) -> Path | None:
    model = config.get("model")
    folder = model.get("hf_checkpoint") if isinstance(model, Mapping) else None
    return Path(folder) if isinstance(folder, str) and _has_weights(Path(folder)) else None


def _weight_lines(pairs: Sequence[tuple[str, Path, Path]]) -> tuple[list[str], bool]:
    """Compare the folders one after the other up to the first that differs."""
    with quiet():
        from fusionrl.trainer.weight_differences import first_differing_tensor

        for name, one, other in pairs:
            if text := first_differing_tensor(one, other):
                return [f"{name}: the first tensor that differs is {text}"], True
    equal = ", ".join(name for name, _, _ in pairs)
    return [
        f"equal bit by bit: {equal}" if pairs else "both began with the same model folder and share no checkpoint"
    ], False
