"""The modes besides rl, each run through the command line; one feeds the next."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusionrl.config.hooks import SIGNATURES, flag_of
from fusionrl.data.supervised import MultiTurnLossMaskGenerator
from fusionrl.observe.rollouts import list_rollouts
from tests.e2e.all_hooks import HOOKS
from tests.e2e.launch import metrics_of, run, undocumented_files

pytestmark = pytest.mark.e2e
# What a run with a custom loss and a generate function has no place for: tests/rollout/test_agent.py, tests/e2e/
# test_sessions.py, tests/trainer/test_losses.py.
ELSEWHERE = {
    "tools_path",
    "agent_path",
    "custom_policy_loss_path",
    "custom_tis_function_path",
    "custom_pg_loss_reducer_function_path",
}
# The other functions are called in the Buffer, or in a reward process, which writes to the Buffer's log.
IN_TRAINERS = {
    "custom_advantage_function_path",
    "rollout_data_postprocess_path",
    "custom_loss_function_path",
    "custom_model_provider_path",
    "custom_spec_path",
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "custom_update_weight_post_write_path",
}


def _validation_set(task: Path, folder: Path) -> Path:
    """37 of the conversations: no multiple of anything."""
    path = folder / "val.jsonl"
    path.write_text("".join((task / "sft.jsonl").read_text().splitlines(keepends=True)[:37]))
    return path


def _loss_by_transformers(folder: Path, conversations: Path) -> float:
    """Mean of -log p over the assistants' tokens, one conversation at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    masks, losses = MultiTurnLossMaskGenerator(tokenizer), []
    for line in conversations.read_text().splitlines():
        tokens, mask = masks.get_loss_mask(json.loads(line)["messages"])
        with torch.no_grad():
            log_probs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        losses += [-float(log_probs[i - 1, tokens[i]]) for i, trained in enumerate(mask) if trained]
    return sum(losses) / len(losses)


def test_one_mode_feeds_the_next(task: Path, tmp_path: Path) -> None:
    """sft -> reject-sampling -> sft on what it accepted -> rl with a function of a user in every place.

    The mode eval: test_eval_engines.py.
    """
    sft = ["--mode", "sft", "--device", "cpu", "--lr", "2e-3", "--input-key", "messages", "--no-save"]
    run(
        [*sft, "--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "sft.jsonl"), "--rollout-shuffle"]
        + ["--num-rollout", "20", "--rollout-batch-size", "64", "--actor-num-gpus-per-node", "2"]
        + ["--run-dir", str(tmp_path / "sft"), "--save-hf", str(tmp_path / "model")]
        + ["--eval-prompt-data", "val", str(_validation_set(task, tmp_path)), "--eval-interval", "10"],
        tmp_path,
    )
    rows = metrics_of(tmp_path / "sft")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < 0.6 * losses[0]
    validation = {row["step"]: row["eval/val/loss"] for row in rows if "eval/val/loss" in row}
    assert list(validation) == [0, 10, 20] and validation[20] < validation[10] < validation[0]
    for step, model in ((0, task / "model"), (20, tmp_path / "model")):
        assert validation[step] == pytest.approx(_loss_by_transformers(model, tmp_path / "val.jsonl"), rel=1e-4)
    assert not list((tmp_path / "sft" / "logs").glob("engine-*.log")), "sft starts no engine"
    assert [file.step for file in list_rollouts(tmp_path / "sft")] == list(range(1, 21))
    assert not list((tmp_path / "sft").glob("checkpoints/*")), "--no-save writes no checkpoint"

    common = ["--device", "cpu", "--input-key", "prompt", "--label-key", "label", "--apply-chat-template"]
    common += ["--rollout-max-response-len", "6"]
    prompts = ["--prompt-data", str(task / "train.jsonl"), "--rollout-batch-size", "16", "--n-samples-per-prompt", "4"]
    accepted = tmp_path / "accepted.jsonl"
    run(
        [*common, *prompts, "--mode", "reject-sampling", "--no-trainer", "--hf-checkpoint", str(tmp_path / "model")]
        + ["--custom-rm-path", "tests/e2e/hooks.py:partial_credit", "--reject-sampling-threshold", "0.3"]
        + ["--num-rollout", "2", "--reject-sampling-output", str(accepted), "--run-dir", str(tmp_path / "reject")],
        tmp_path,
    )
    logs = {path.name for path in (tmp_path / "reject" / "logs").iterdir()}
    assert "engine-0.log" in logs and not any("trainer" in name for name in logs), "--no-trainer starts no trainer"
    rows = [json.loads(line) for line in accepted.read_text().splitlines()]
    assert rows and all(row["reward"] >= 0.3 for row in rows)
    assert sum(row["rollout/accepted"] for row in metrics_of(tmp_path / "reject")) == len(rows)
    assert len({json.dumps(row["messages"][:-1]) for row in rows}) == len(rows), "one accepted sample a prompt"

    again = run(
        [*sft, "--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(accepted), "--num-rollout", "1"]
        + ["--rollout-batch-size", "4", "--run-dir", str(tmp_path / "again"), "--save-hf", str(tmp_path / "refined")]
        # A function that would fail the run if it were called: nothing has given it a place to write to.
        + ["--rollout-data-postprocess-path", "tests/e2e/all_hooks.py:rollout_data_postprocess_path"],
        tmp_path,
    )
    said = "not called in --mode sft, where it has no policy loss: --rollout-data-postprocess-path"
    assert said in again.output()
    assert metrics_of(tmp_path / "again")[0]["train/num_samples"] == 4

    common += ["--hf-checkpoint", str(tmp_path / "refined"), "--eval-prompt-data", "held-out", str(task / "eval.jsonl")]
    seen = tmp_path / "seen"
    (tmp_path / "mine.yaml").write_text(f"seen: {seen}\n")
    run(
        [*common, *prompts, "--mode", "rl", "--num-rollout", "2", "--lr", "1e-4", "--custom-config-path"]
        + [str(tmp_path / "mine.yaml"), "--loss-type", "custom_loss", "--run-dir", str(tmp_path / "rl"), "--no-save"]
        + ["--update-weight-transport", "disk", "--update-weight-mode", "delta", "--verify-weights", "always"]
        + ["--update-weight-local-checkpoint-dir", str(tmp_path / "local")]
        + [part for field, name in HOOKS.items() for part in (flag_of(field), f"tests/e2e/all_hooks.py:{name}")],
        tmp_path,
    )
    assert set(seen.read_text().split()) == set(HOOKS) == set(SIGNATURES) - ELSEWHERE
    # What they print is where docs/reference/run-folder.md says.
    for log, names in {"trainer-0.a1.log": IN_TRAINERS, "buffer.a1.log": set(HOOKS) - IN_TRAINERS}.items():
        text = (tmp_path / "rl" / "logs" / log).read_text()
        assert {line.removeprefix("printed by ") for line in text.splitlines() if "printed by" in line} == names
    for name in ("sft", "reject", "rl"):
        assert not undocumented_files(tmp_path / name), "docs/reference/run-folder.md has no row for them"
    first, *steps = metrics_of(tmp_path / "rl", own=["train/difference_of_mine"])
    assert (first["perf/update_weights_density"], first["sync/full_hosts"]) == (1.0, 0.0)
    for step in steps:
        assert step["perf/update_weights_density"] < 1.0 and step["sync/full_hosts"] == 0.0
        assert 0 < step["sync/pause_s"] < step["perf/time_sync_s"]
    assert not any((tmp_path / name).exists() and list((tmp_path / name).iterdir()) for name in ("local", "rl/weights"))
    assert [step["train/masked_samples"] for step in steps] == [1.0, 1.0], "one sample of each rollout is removed"
    assert [step["train/num_samples"] for step in steps] == [64.0, 64.0], "and counts all the same"
    assert all(step["train/difference_of_mine"] < 1e-5 for step in steps)
