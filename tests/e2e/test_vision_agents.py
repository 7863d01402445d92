"""Images in samples of several turns, in a whole run: what trainers make of them is what engines sampled."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fusionrl.observe.rollouts import images_of_row, read_rollouts
from tests.e2e.launch import metrics_of, run
from tests.e2e.vision_agents import NUM_TURNS
from tests.rollout.engine import needs
from tests.tiny_vision import CHAT_TEMPLATE, IMAGE, VIDEO, make_tiny_vlm

pytestmark = [pytest.mark.e2e, needs("openai", "anthropic")]
AGENTS = "tests/e2e/vision_agents.py"


def test_zoom_sessions_and_sampled_placeholders_are_trained(tmp_path: Path) -> None:
    """The log-probs of all sampled tokens are the trainers', behind crops and images of agents as well.

    The model often samples a placeholder, which ends a sample of several turns, and none of one.
    """
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    make_tiny_vlm(model, "qwen3_vl")
    names_tools = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(names_tools + CHAT_TEMPLATE)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][[IMAGE, VIDEO]] *= 7  # so that its logits differ more from one token to the next
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    pixels = np.random.default_rng(0).integers(0, 256, (4, 256, 256, 3), np.uint8)
    rows = []
    for number, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / f"{number}.png")
        rows.append({"problem": "<image>Which?", "images": [f"{number}.png"]})
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = tmp_path / "run"
    flags = ["--mode", "rl", "--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "train.jsonl")]
    flags += ["--input-key", "problem", "--multimodal-keys", '{"image": "images"}', "--apply-chat-template"]
    flags += ["--custom-generate-function-path", f"{AGENTS}:generate", "--tools-path", f"{AGENTS}:tools"]
    flags += ["--tool-call-parser", "any_text", "--max-turns", "2", "--agent-path", f"{AGENTS}:shows"]
    flags += ["--custom-rm-path", f"{AGENTS}:length", "--image-max-pixels", "4096", "--rollout-max-context-len", "300"]
    flags += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "6"]
    flags += ["--num-rollout", "1", "--lr", "1e-3", "--device", "cpu", "--no-save", "--run-dir", str(folder)]
    run(flags, tmp_path)
    (row,) = [row for row in metrics_of(folder) if "train/loss" in row]
    assert row["train/logprob_diff_max"] < 1e-4 and row["train/grad_norm"] > 0
    samples: list[Any] = list(read_rollouts(folder, "train"))
    assert row["rollout/sampled_placeholders"] == np.count_nonzero([*map(sampled_placeholders, samples)])
    for kind, name in enumerate(NUM_TURNS):
        own = [sample for sample in samples if sample["index"] % 4 == kind]
        assert len(own) == 16, name
        whole = []
        for sample in own:
            num_turns = np.count_nonzero(np.diff([0, *sample["loss_mask"]]) == 1)
            images: list[Any] = images_of_row(sample)
            sizes = [image["height"] * image["width"] // 1024 for image in images]
            assert sizes == ([4, 4] if name in ("one turn", "zoom") else [4, 3])[: len(sizes)]
            if num_turns == NUM_TURNS[name]:
                whole.append(sample)
            elif sampled_placeholders(sample):
                assert sample["status"] == "truncated"
        assert len(whole) > 2 and (name != "one turn" or any(map(sampled_placeholders, own)))


def sampled_placeholders(sample: dict) -> int:
    response = np.array(sample["tokens"][-sample["response_length"] :])
    return int(np.isin(response[np.array(sample["loss_mask"]) == 1], (IMAGE, VIDEO)).sum())
