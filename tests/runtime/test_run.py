"""The driver's loop: what it says of a step's numbers."""

from __future__ import annotations

from fusionrl.config.config import Config
from fusionrl.runtime.reporter import MismatchWatch, mask_functions

# Of a step in which a fifth of the trained tokens are a tool's.
NUMBERS = {
    "train/logprob_not_finite": 0.0,
    "train/logprob_diff_mean": 0.6,
    "train/logprob_diff_max": 9.0,
    "train/logprob_diff_signed": -0.6,
    "train/logprob_k3": 0.4,
    "train/logprob_diff_over": 0.2,
    "train/logprob_ess": 0.8,
    "train/logprob_ratio_mean": 0.81,
    "train/logprob_ratio_error": 0.001,
    "train/logprob_not_sampled": 0.199,
}


def test_the_functions_that_set_masks_are_named() -> None:
    assert mask_functions(Config()) == []
    assert mask_functions(Config.from_flat({"custom_rm_path": "a.py:rm", "tools_path": "a.py:tools"})) == []
    config = Config.from_flat({"custom_generate_function_path": "a.py:f", "rollout_sample_hook_path": ["b.g", "b.h"]})
    functions = mask_functions(config)
    assert functions == [
        "--custom-generate-function-path a.py:f",
        "--rollout-sample-hook-path b.g",
        "--rollout-sample-hook-path b.h",
    ]
    watch = MismatchWatch()
    text = watch.look(1, NUMBERS, functions)
    assert text is not None and "the loss_mask that --custom-generate-function-path a.py:f or" in text
    assert watch.look(2, NUMBERS, functions) is None, "once in a while"
