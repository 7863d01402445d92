"""Which runs need the sandbox, and what is said where there is none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fusionrl import sandbox
from fusionrl.checks.rewards import AGENT, sandbox_of_run, uses_sandbox
from fusionrl.config.config import Config

Rows, Configs = Callable[..., Path], Callable[..., Config]


@pytest.fixture
def config(tiny_model: Path, write_rows: Rows) -> Configs:
    """config(flag=value, …)."""
    data = write_rows([{"input": "1+1=", "label": "2"}])
    base = {"hf_checkpoint": str(tiny_model), "prompt_data": str(data), "label_key": "label", "rollout_batch_size": 1}
    return lambda **changes: Config.from_flat(base | changes)


def test_who_needs_the_sandbox(config: Configs, tmp_path: Path) -> None:
    assert uses_sandbox(config(rm_type="exact")) is None
    assert uses_sandbox(config(rm_type="nonsense")) is None
    assert uses_sandbox(config(rm_type="code")) == "--rm-type code"
    assert uses_sandbox(config(rm_type="format:0.1+code_all")) == "--rm-type format:0.1+code_all"
    assert uses_sandbox(config(rm_type="code", custom_rm_path="a.b")) is None, "the function scores"
    assert "--tools-path" in (uses_sandbox(config(custom_generate_function_path=AGENT)) or "")
    assert uses_sandbox(config(custom_generate_function_path=AGENT, tools_path="a.b")) is None
    sets = tmp_path / "sets.yaml"
    sets.write_text("eval:\n  datasets:\n  - {name: mbpp, path: x.jsonl, rm_type: code}\n")
    assert "set mbpp" in (uses_sandbox(config(rm_type="exact", eval_config=str(sets))) or "")


def test_a_run_without_programs_starts_none(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "probe", lambda: pytest.fail("no program was to be started"))
    assert sandbox_of_run(config(rm_type="exact")) is None


def test_no_sandbox_is_an_error_before_the_run(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise sandbox.SandboxError("the sandbox could not start the code: no reason")

    monkeypatch.setattr(sandbox, "probe", refuse)
    with pytest.raises(ValueError, match="--rm-type code: the sandbox could not start the code"):
        sandbox_of_run(config(rm_type="code"))


def test_the_plan_names_the_mode(config: Configs) -> None:
    mode = sandbox_of_run(config(rm_type="code", allow_weak_sandbox=True))
    assert mode is not None and mode.startswith(("namespaces, seccomp", "weak, seccomp"))
    assert "memory by" in mode
