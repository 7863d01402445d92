"""What the driver says of a step stands on the console and in the log."""

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.buffer.rollout_report import rollout_facts
from fusionrl.buffer.rollout_stages import Rollout
from fusionrl.config.config import Config
from fusionrl.data.sample import Sample, Status
from fusionrl.observe.logs import setup_logging
from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.progress import Progress
from fusionrl.runtime.loops import Step
from fusionrl.runtime.reporter import Reporter, advice_settings, mask_functions
from fusionrl.runtime.run import Run
from fusionrl.runtime.supervisor import StopSignal


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[io.StringIO]:
    """What goes to the console; driver.log is in the test's folder."""
    before = logging.getLogger().handlers[:], logging.getLogger().level
    stream = io.StringIO()
    with Progress(9, "rl", stream) as progress:
        stream.progress = progress  # type: ignore[attr-defined]
        setup_logging("info", tmp_path / "driver.log", console=progress.print)
        yield stream
    logging.getLogger().handlers[:], logging.getLogger().level = before


def run_of(screen: Any, folder: Path, rollout: Rollout | None = None, **flags: Any) -> Run:
    actors: Any = SimpleNamespace(buffer=SimpleNamespace(wait_rollout=lambda started: rollout))
    config, plan, nothing = Config.from_flat(flags), SimpleNamespace(eval_bundles=()), None
    reporter = Reporter(config, folder, MetricsSink(folder, 1), screen.progress)
    return Run(config, plan, folder, actors, reporter, nothing, StopSignal(), 0, -1)  # type: ignore[arg-type]


def test_a_mismatch_and_a_cut_off_evaluation(screen: io.StringIO, tmp_path: Path) -> None:
    """A user's function that may set masks is named."""
    run = run_of(screen, tmp_path, custom_generate_function_path="a.py:f", custom_rm_path="a.py:rm")
    far = {"logprob_diff_mean": 0.6, "logprob_diff_max": 9.0, "logprob_k3": 0.4, "logprob_ess": 0.8}
    far |= {"logprob_ratio_mean": 0.81, "logprob_ratio_error": 0.001, "logprob_diff_over": 0.2}
    far |= {"logprob_not_finite": 0.0, "logprob_diff_signed": -0.6, "logprob_not_sampled": 0.199}
    values = {f"train/{name}": value for name, value in far.items()}
    run.reporter.record(3, values | {"eval/held-out/truncated_ratio": 0.9})
    run.reporter.record(4, values | {"eval/held-out/truncated_ratio": 0.9})
    for text in (screen.getvalue(), (tmp_path / "driver.log").read_text()):
        assert text.count("engine and trainer disagree") == 1 and "step 3: engine and trainer" in text
        assert text.count("evaluation set held-out: 90%") == 1
        assert "--custom-generate-function-path a.py:f" in text and "a.py:rm" not in text
    hooks = Config.from_flat({"tools_path": "a.py:tools", "rollout_sample_hook_path": ["b.g", "b.h"]})
    assert mask_functions(hooks) == ["--rollout-sample-hook-path b.g", "--rollout-sample-hook-path b.h"]


def test_a_rollout_that_teaches_nothing(screen: io.StringIO, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"tokens": [1, 2, 3], "response_length": 2, "status": Status.COMPLETED}
    samples = [Sample(index=i, group_index=i // 2, response="\x1b[2Jno", label="x", **fields) for i in range(4)]
    flags = {"n_samples_per_prompt": 2, "log_samples": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}
    facts, glimpses = rollout_facts(Config.from_flat(flags), samples, [0.0] * 4, [0.0] * 4)
    rollout = Rollout(4, [], facts=facts, glimpses=glimpses)
    run = run_of(screen, tmp_path, rollout, **flags)
    run.actors.buffer.next_rollout = lambda rollout_id: None
    assert Step(run, 4, saves=False).fetch() is rollout
    shown = screen.getvalue()
    assert "step 5: 2 samples" in shown and "\x1b" not in shown
    for text in (shown, (tmp_path / "driver.log").read_text()):
        assert "WARNING" in text
        assert "step 5: this rollout teaches nothing beyond --use-kl-loss: all 2 groups have equal rewards" in text
        assert f"look: fusionrl show {tmp_path} --step 5 --all-equal" in text


def test_the_flags_that_warnings_name() -> None:
    flags = {"label_key": "answer", "rollout_max_response_len": 7, "entropy_coef": 0.1, "use_kl_loss": True}
    settings = advice_settings(Config.from_flat(flags), Path("runs/x"))
    assert (settings.run, settings.label_key, settings.max_response_len) == ("runs/x", "answer", 7)
    assert settings.other_terms == ("--entropy-coef",), "a KL term with a coefficient of 0 trains nothing"
    assert settings.threshold is None
    rejecting = {"mode": "reject-sampling", "reject_sampling_threshold": 0.5}
    assert advice_settings(Config.from_flat(rejecting), Path("x")).threshold == 0.5
