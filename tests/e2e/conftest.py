"""One tiny model and its task for every end-to-end test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(autouse=True)
def _begin_warm(request: pytest.FixtureRequest) -> None:
    """Begin runs with forks of the session's nursery; those of a test that is marked cold make their own imports."""
    if request.node.get_closest_marker("cold") is None:
        request.getfixturevalue("warm")


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with model/, sft.jsonl, train.jsonl and eval.jsonl of the quickstart's task; the first worker makes it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "task"
    with FileLock(shared / "task.lock"):
        if not folder.exists():
            tool, made = Path(__file__).parents[2] / "tools" / "make_quickstart.py", shared / "task-in-the-making"
            command = [sys.executable, str(tool), "--out", str(made), "--seed", "5"]
            subprocess.run(command, check=True, capture_output=True)
            lines = (made / "eval.jsonl").read_text().splitlines()[:32]
            (made / "eval.jsonl").write_text("\n".join(lines) + "\n")
            made.rename(folder)
    return folder


@pytest.fixture(scope="session")
def rl_flags(task: Path) -> list[str]:
    """A small rl run: 8 prompts x 4 samples a step, partial credit so that there is something to learn from."""
    return [
        *("--mode", "rl", "--hf-checkpoint", str(task / "model")),
        *("--prompt-data", str(task / "train.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--custom-rm-path", "tests/e2e/hooks.py:partial_credit"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
        *("--rollout-shuffle", "--lr", "1e-3", "--device", "cpu"),
    ]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where a live run leaves its rollouts, <rollout_id>.jsonl, for tests that train on recorded ones."""
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="session")
def experts(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with experts (Qwen3-MoE) and the task's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("experts")
    dense = AutoConfig.from_pretrained(task / "model")
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=dense.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=dense.max_position_embeddings,
        initializer_range=0.08,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(folder)
    return folder
