"""The glossary of metrics against the code that reports them. Whole runs compare it in tests/e2e/launch.py."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusionrl.algorithms.corrections import CorrectionOptions, importance_weights, opsm_mask
from fusionrl.algorithms.divergence import mismatch_metrics, mismatch_sums
from fusionrl.algorithms.dpo import pair_slopes
from fusionrl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossOptions, value_loss
from fusionrl.algorithms.sequences import Sequences
from fusionrl.cli import main
from fusionrl.observe.glossary import GLOSSARY, ON_THE_CONSOLE, describe, entry_of, render_glossary, undocumented
from fusionrl.runtime.reporter import _SHOWN
from fusionrl.trainer.step_report import WITH_MAXIMUM, WITH_MINIMUM, StepReport, pooled_metrics

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fusionrl"
HOW = (
    "declare it in METRICS of the module that computes it, or correct the declaration of the old name, "
    "and run: python -m fusionrl.cli metrics > docs/reference/metrics.md"
)
_METRIC = re.compile(r"(rollout|train|eval|perf|sync|critic|prm|hardware|run)/[\w{}/@]+")
# `PolicyTrainer.evaluate_loss` answers with the first two; the driver reports them with the set's name. The last one is
# filled in with "timeout" and "crash", see `RewardPool`.
NO_METRICS = {"eval/loss", "eval/num_tokens", "eval/reward_{}"}


def names_in_the_code() -> Iterator[tuple[str, str]]:
    """(name, file) of every metric that the code spells out; a part that it fills in is {}."""
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if _METRIC.search(source) and path.name != "glossary.py" else ():
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
            if _METRIC.fullmatch(text) and not text.endswith("_"):  # else the beginning of a longer one
                yield text, str(path.relative_to(PACKAGE))


def _names(spelled: str, name: str) -> bool:
    """Return whether the code's spelling of a name, with {} for filled-in parts, can be this one."""
    return re.fullmatch(".+".join(map(re.escape, spelled.split("{}"))), name) is not None


def test_every_name_in_the_code_is_documented() -> None:
    names = {name: file for name, file in names_in_the_code() if name not in NO_METRICS}
    assert {"train/loss", "perf/step_time_s", "eval/{}/loss"} <= set(names), "the search is broken"
    # Nothing is known of a name that is filled in as a whole; the tests below call what makes these.
    # What ends with a slash is the beginning of an f-string, which is there as a whole too.
    spelled = {name for name in names if not re.fullmatch(r"\w+(/\{\})+", name) and not name.endswith("/")}
    unknown = {name for name in spelled if undocumented([name.replace("{}", "x")])}
    missing = {name: names[name] for name in unknown if not any(_names(name, known) for known in GLOSSARY)}
    assert not missing, f"no entry describes these metrics: {missing}; {HOW}"


def test_every_entry_is_of_a_metric_that_its_module_computes() -> None:
    """Outside of its METRICS, the module spells the name, as a whole or with open parts, or the name's last part."""
    stale, sources = [], {source: (PACKAGE / source).read_text() for source in {e.source for e in GLOSSARY.values()}}
    spelled = list(names_in_the_code())
    assert len(GLOSSARY) == render_glossary().count("\n| `"), "each name has one row"
    for name, entry in GLOSSARY.items():
        assert entry.unit and entry.meaning.endswith("."), name
        text = re.sub(r'^METRICS = """.*?^"""$', "", sources[entry.source], flags=re.MULTILINE | re.DOTALL)
        last = re.sub("_(min|max|ci95)$", "", name.rsplit("/", 1)[1])  # added to a name that the module has
        is_there = all(part in text for part in re.split(r"<\w+>", last))
        if not is_there and not any(file == entry.source and _names(known, name) for known, file in spelled):
            stale.append(f"{name} ({entry.source})")
    assert not stale, f"nothing reports these metrics of the glossary: {stale}; {HOW}"


def reported_by_losses() -> Iterator[tuple[str, dict]]:
    """(prefix, metrics) of every function whose metrics take their names from it."""
    new, old, advantages = -torch.rand(3, 6, generator=torch.Generator().manual_seed(1))
    mask, sequences = torch.ones(6), Sequences(torch.tensor([0, 0, 1, 1, 1, 1]), 2)
    for name, loss in POLICY_LOSSES.items():
        extra = {"selected": torch.ones(6) > 0} if name in ("clip_cov", "kl_cov") else {}
        options = PolicyLossOptions(dual_clip=3.0)
        yield "train", loss(new, old, advantages, mask, sequences, options, **extra)[1]
    yield "train", importance_weights(new, old, mask, sequences, CorrectionOptions())[2]
    yield "train", opsm_mask(new, old, advantages, mask, sequences, 0.1)[1]
    yield "train", pair_slopes([(0, 1.0, 0.5), (0, -1.0, 0.2)], 0.1, 0.0)[1]
    yield "critic", value_loss(new, old, advantages, 0.2)[1]
    yield "train", mismatch_metrics(*mismatch_sums(new, old, mask))
    extremes = dict.fromkeys([*WITH_MAXIMUM, *WITH_MINIMUM], 1.0)
    extremes = {name: value for name, value in extremes.items() if not name.startswith("value_")}
    yield "train", pooled_metrics([StepReport({}, {"tokens": 1.0}, numbers=extremes)])


def test_what_the_losses_report_is_documented() -> None:
    names = [f"{prefix}/{name}" for prefix, metrics in reported_by_losses() for name in metrics]
    assert len(set(names)) > 30
    assert not undocumented(names), f"no entry describes {undocumented(names)}; {HOW}"
    assert {name for name, entry in GLOSSARY.items() if entry.section == "Engine against trainer"} <= set(names)


def test_a_name_that_nothing_describes_is_found() -> None:
    line = {"step": 1, "attempt": 1, "time": 0.0, "nonfinite": [], "train/loss": 1.0, "train/los": 1.0, "mine": 2.0}
    assert undocumented(line) == ["mine", "train/los"]
    assert entry_of("eval/a/b/pass@16") is GLOSSARY["eval/<set>/pass@<k>"]
    assert entry_of("rollout/reward_timeout") is GLOSSARY["rollout/reward_timeout"], "the exact name goes first"
    assert entry_of("eval/accuracy") is None, "a pattern's open part is not empty"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics"]) == 0
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page, "run: python -m fusionrl.cli metrics > docs/reference/metrics.md"
    assert main(["metrics", "eval/gsm8k/pass@4"]) == 0
    assert "at least one of k samples" in capsys.readouterr().out
    assert main(["metrics", "train/no_such"]) == 2
    assert "no metric is called 'train/no_such'" in capsys.readouterr().err
    assert describe("mismatch").startswith("train/logprob_diff_mean"), "the step line's own word"
    assert set(ON_THE_CONSOLE.values()) <= set(_SHOWN.values()) and set(ON_THE_CONSOLE.values()) <= set(GLOSSARY)
    assert describe("grad_norm").count("from: fusionrl/") == 10, (
        "of three models: mean, minimum, maximum; of an adapter"
    )
