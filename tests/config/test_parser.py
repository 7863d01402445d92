"""The command line: what it turns into; every mistake on it is listed at once with flag, value and cure."""

from pathlib import Path

import pydantic
import pytest

from fusionrl.config.config import GROUPS, Config
from fusionrl.config.parser import CommandLineError, parse_args, read_args


def errors_of(*argv: str) -> list[str]:
    with pytest.raises(CommandLineError) as caught:
        parse_args(argv)
    return caught.value.errors


def test_values_take_the_types_of_their_fields() -> None:
    line = "--mode sft --lr=2e-5 --no-calculate-per-token-loss --rollout-top-k -1"
    config = parse_args([*line.split(), "--rollout-stop", "a", "b c", "--resume=false", "--dry-run=True"])
    assert (config.run.mode, config.run.dry_run, config.run.resume) == ("sft", True, False)
    assert (config.train.lr, config.algorithm.calculate_per_token_loss) == (2e-5, False)
    assert (config.rollout.rollout_stop, config.rollout.rollout_top_k) == (["a", "b c"], -1)


def test_every_mistake_is_listed_at_once() -> None:
    wanted = {
        "--mode grpo": "'rl', 'sft', 'reject-sampling' or 'eval'",
        "--rollout-batch-size 0": "greater than or equal to 1",
        "--lr -1e-3": "greater than or equal to 0",
        "--num-epoch": "needs a value",
        "--colocate=3": "off by --no-colocate",
        "--rollout-temperature nan": "finite",
        "--apply-chat-template-kwargs {x": "not valid JSON",
        "--n-samples-per-prompt 2.5": "integer",
        "--sglang-config x.yaml": "its groups are texts here: --engine-group",
        "--name a/b": "pattern",
    }
    found = errors_of(*" ".join(wanted).split())
    for start, text in wanted.items():
        assert any(e.startswith(start) and text in e for e in found), (start, found)
    assert len(found) == len(wanted), found


def test_what_fits_is_kept_beside_what_does_not() -> None:
    config, errors = read_args(["--lr", "x", "--num-rollout", "3", "--rollout-stop-token-ids", "1", "b"])
    assert (len(errors), config.run.num_rollout, config.rollout.rollout_stop_token_ids) == (2, 3, [])
    assert config.train.lr == Config().train.lr
    found = errors_of("--num-rollout", "3", "4", "-lr", "1")
    assert any("4" in e and "unexpected argument" in e for e in found)


def test_config_is_frozen_and_hooks_get_a_copy() -> None:
    config = Config.from_flat({"rollout_stop": ["x"], "apply_chat_template_kwargs": {"a": [1]}})
    with pytest.raises(pydantic.ValidationError):
        config.train.lr = 1.0  # type: ignore[misc]
    args = config.to_args(extra=1)
    args.rollout_stop.append("y")
    args.apply_chat_template_kwargs["a"].append(2)
    again = config.to_args()
    assert (args.extra, again.rollout_stop, again.apply_chat_template_kwargs) == (1, ["x"], {"a": [1]})
    with pytest.raises(ValueError, match="unknown configuration fields: batchsize"):
        Config.from_flat({"batchsize": 3})


def test_field_names_are_unique_over_all_groups() -> None:
    """Hooks get one flat namespace: a second field of one name would hide the first."""
    names = [field for model in GROUPS.values() for field in model.model_fields]
    assert len(names) == len(set(names))


def test_values_of_ones_own_reach_the_args_of_hooks(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("judge_url: http://judge\nweights: {a: 1.5, b: [1, 2]}\n")
    config = parse_args(["--custom-config-path", str(file)])
    args = config.to_args()
    assert args.judge_url == "http://judge" and args.weights == {"a": 1.5, "b": [1, 2]}
    args.weights["a"] = 0
    assert config.to_args().weights["a"] == 1.5, "each hook has a copy of its own"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: x", "--lr x: "),
        ("two words: 1", "'two words'"),
        ("[1, 2]", "mapping"),
        ("a: [1", "cannot be read as YAML"),
        (None, "cannot be read as YAML"),
    ],
)
def test_a_bad_file_of_ones_own_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "own.yaml"
    if text is not None:
        file.write_text(text)
    _, errors = read_args(["--custom-config-path", str(file)])
    assert len(errors) == 1 and message in errors[0]
    assert str(file) in errors[0] or "lr" in message
