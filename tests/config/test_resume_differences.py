"""A resume says in which flags it differs from the run that it goes on with."""

from typing import Any

from fusionrl.config.config import Config, PassThrough
from fusionrl.config.resume_differences import as_written, difference_lines, differences


def config(passthrough: dict[str, Any] | None = None, **values: object) -> Config:
    return Config.from_flat(values, PassThrough(**(passthrough or {})))


def test_the_same_flags_say_nothing() -> None:
    former = config(lr=1e-5, run_dir="a", log_level="debug")
    assert differences(as_written(former), config(lr=1e-5, run_dir="b", resume=True)) == {}


def test_each_flag_that_differs_has_a_line_with_both_values() -> None:
    former = as_written(config(lr=1e-5, colocate=True, prompt_data=["a.jsonl"]))
    now = config(
        {"sglang": {"mem_fraction_static": 0.5}, "optimizer": {"adam_x": 1}, "custom": {"level": 2}},
        lr=1e-3,
        prompt_data=["a.jsonl", "b.jsonl"],
        rollout_shuffle=True,
    )
    lines = difference_lines(former, now, 3)
    wanted = {"--lr 1e-05 -> 0.001", "--colocate true -> false", "--prompt-data a.jsonl -> a.jsonl b.jsonl"}
    wanted |= {"--sglang-mem-fraction-static not given -> 0.5", "--adam-x not given -> 1"}
    wanted |= {"level of --custom-config-path not given -> 2"}
    (shuffled,) = set(lines) - wanted
    assert shuffled.startswith("--rollout-shuffle false -> true (the prompts come in another order") and len(lines) == 7


def test_a_decay_that_is_longer_is_said() -> None:
    former, longer = (config(num_rollout=count, lr_decay_style="linear") for count in (3, 6))
    first, second = difference_lines(as_written(former), longer, 6)
    assert first == "--num-rollout 3 -> 6" and "linear decay of the learning rate ends at optimizer step 6" in second
    constant = difference_lines(as_written(config(num_rollout=3)), config(num_rollout=6), 6)
    assert constant == ["--num-rollout 3 -> 6"]


def test_a_file_of_another_version_is_compared_where_it_can_be() -> None:
    assert differences({"train": {"lr": 1e-6, "gone": 1}, "reward": None}, config()) == {}
    assert differences({}, config(lr=1e-3)) == {"lr": "--lr 1e-06 -> 0.001"}


def test_passwords_are_neither_shown_nor_a_difference() -> None:
    former = config(ray_address="http://me:secret@host:1")
    assert differences(as_written(former), former) == {}
    assert "secret" not in str(differences(as_written(config()), former))
