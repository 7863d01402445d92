"""Checks over several flags and over the files they name: each mistake is found before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.algorithms.estimators import ACCURACY, NONZERO_STD
from fusionrl.checks.outputs import export_errors, unwritable
from fusionrl.checks.rollout import rollout_errors
from fusionrl.checks.training import OF_GROUPS, algorithm_warnings
from fusionrl.checks.validate import validate
from fusionrl.cli.resolve import resolve
from fusionrl.config.config import Config, PassThrough
from fusionrl.config.parser import CommandLineError, read_args
from fusionrl.observe.run_dir import RunDir, forget_export, note_export
from tests.tiny_model import make_fp8, make_tiny_qwen3

Errors, Rows = Callable[..., list[str]], Callable[..., Path]
SESSIONS, AGENT = "fusionrl.rollout.sessions.generate", "tests/rollout/session_agents.py:blocking"
RATIOS, GENERATE = "tests/buffer/buffer_hooks.py:ratios", "tests/e2e/slime_functions.py:two_answers"
NARROW = {"dynamic_sampling_filter_path": ACCURACY, "accuracy_lower_bound": 0.6, "accuracy_upper_bound": 0.7}


@pytest.fixture
def base(tiny_model: Path, write_rows: Rows) -> dict[str, Any]:
    """A configuration without a mistake."""
    data = str(write_rows([{"input": "1+1=", "label": "2"}, {"input": "2+2=", "label": "4"}]))
    values = {"hf_checkpoint": str(tiny_model), "prompt_data": data, "label_key": "label", "rm_type": "exact"}
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 4, "num_rollout": 1}
    return values | sizes | {"device": "cpu"}


@pytest.fixture
def errors(base: dict[str, Any]) -> Errors:
    """errors(field=value, …) -> messages; a value of None takes the flag away."""

    def find(**changes: Any) -> list[str]:
        values = {name: value for name, value in (base | changes).items() if value is not None}
        return validate(Config.from_flat(values))[1]

    return find


def one(found: list[str], *parts: str) -> None:
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


@pytest.mark.parametrize(("value", "is_wrong"), [(0.0, True), (1.0, True), (1.7, True), (-0.5, True), (0.8, False)])
def test_no_engine_takes_a_whole_device_or_more(base: dict[str, Any], value: float, is_wrong: bool) -> None:
    pytest.importorskip("sglang")
    groups = [f"wide:num_gpus=1,per_engine=1,mem-fraction-static={value}"]
    config = Config.from_flat(base | {"rm_server_args": {"mem_fraction_static": value}, "engine_group": groups})
    config = config.model_copy(update={"passthrough": PassThrough(sglang={"mem_fraction_static": value})})
    flags = ("--sglang-mem-fraction-static", "--rm-server-args mem_fraction_static", "--engine-group wide")
    errors = rollout_errors(config)
    assert [sum(error.startswith(flag) for error in errors) for flag in flags] == [is_wrong] * 3


def test_a_good_configuration(base: dict[str, Any]) -> None:
    checked, errors = validate(Config.from_flat(base))
    assert (errors, checked.num_prompts, checked.shape.num_layers) == ([], 2, 2)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"pipeline": "stream", "in_flight": "retract"}, ["--pipeline stream: --in-flight is retract", "at least 1"]),
        ({"pipeline": "async", "admission_lead": 3.0}, ["--admission-lead is 3", "0 to --max-staleness (2)"]),
        ({"prompt_data": None}, ["--prompt-data is required in --mode rl"]),
        ({"prompt_data": None, "data_source_path": "mine.py:Source"}, []),
        ({"rollout_batch_size": None}, ["--rollout-batch-size is required"]),
        ({"num_rollout": None}, ["--num-rollout or --num-epoch is required"]),
        ({"rm_type": None}, ["a reward is required in --mode rl", "--rm-type or --custom-rm-path"]),
        ({"use_routing_replay": True}, ["--use-routing-replay: the model of --hf-checkpoint has no experts"]),
        ({"rm_type": "exakt"}, ["--rm-type exakt", "known are", "last_number"]),
        ({"rm_type": "dapo"}, ["--rm-type dapo gives a dict", "--reward-key score"]),
        ({"overlong_buffer_len": 5}, ["--overlong-buffer-len 5 is longer than --rollout-max-response-len 4"]),
        ({"length_penalty_coef": 0.5, "custom_reward_post_process_path": RATIOS}, ["0.5 and --custom-reward-post-pro"]),
        ({"rollout_max_response_len": None}, ["--rollout-max-response-len is required"]),
        ({"mode": "eval"}, ["--eval-prompt-data is required"]),
        ({"eval_prompt_data": ["a"]}, ["--eval-prompt-data a", "pairs"]),
        ({"debug_rollout_only": True, "debug_train_only": True, "mode": "sft"}, ["exclude each other"]),
        ({"debug_train_only": True}, ["needs --load-debug-rollout-data"]),
        ({"rollout_num_gpus_per_engine": 3}, ["--rollout-num-gpus-per-engine 3", "4 attention heads"]),
        ({"rollout_num_gpus_per_engine": 4, "num_gpus_per_node": 3}, ["several nodes takes whole ones", "take 3 or 6"]),
        ({"rollout_top_p": 0.9}, ["--rollout-top-p", "biased"]),
        ({"rollout_ignore_eos": True, "rollout_stop": ["x"]}, ["--rollout-ignore-eos", "--rollout-stop"]),
        ({"custom_generate_function_path": SESSIONS}, [f"{SESSIONS} runs your agent", "--agent-path"]),
        ({"agent_path": AGENT}, [f"--agent-path needs --custom-generate-function-path {SESSIONS}"]),
        ({"resume": True}, ["--resume", "--run-dir"]),
        ({"save_debug_rollout_data": "x/{rollout_id}_{rank}.jsonl"}, ["--save-debug-rollout-data", "only field"]),
        ({"save_debug_rollout_data": "x/all.jsonl"}, ["overwrite", "{rollout_id}"]),
        ({"save_hf": "out/{step}"}, ["--save-hf out/{step}", "{rollout_id}"]),
        ({"n_samples_per_prompt": 1, "dynamic_sampling_filter_path": NONZERO_STD}, ["-per-prompt 1", "at least 2"]),
        (NARROW, ["drops every group of --n-samples-per-prompt 2", "0.6 … --accuracy-upper-bound 0.7"]),
        ({"custom_rm_path": "no_module.rm", "rm_type": None}, ["--custom-rm-path", "no_module"]),
    ],
)
def test_one_mistake_gives_one_message(errors: Errors, changes: dict[str, Any], parts: list[str]) -> None:
    one(errors(**changes), *parts)


def test_a_checkpoint_with_a_file_missing(errors: Errors, tiny_model: Path, tmp_path: Path) -> None:
    missing = {"model.safetensors": "no .safetensors file", "tokenizer.json": "no tokenizer"}
    for name, part in (missing | {"config.json": "no config.json"}).items():
        folder = shutil.copytree(tiny_model, tmp_path / name, ignore=shutil.ignore_patterns(name))
        one(errors(hf_checkpoint=str(folder)), "--hf-checkpoint", str(folder), part)


def test_a_reference_of_another_shape(errors: Errors, tmp_path: Path) -> None:
    one(errors(ref_load=str(make_tiny_qwen3(tmp_path / "reference", num_layers=3))), "--ref-load", "differs")
    one(errors(ref_load=str(tmp_path / "none")), "--ref-load", "there is no such folder")


def test_bad_data_is_not_told_again_as_too_few_rows_for_an_epoch(base: dict[str, Any], write_rows: Rows) -> None:
    data = str(write_rows([{"question": "1+1=", "label": "2"}] * 30, "bad.jsonl"))
    values = base | {"prompt_data": data, "num_epoch": 1, "rollout_batch_size": 32}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if name != "num_rollout"]
    with pytest.raises(CommandLineError) as caught:
        resolve(flags)
    one(caught.value.errors, "column 'input' is missing in 30 of 30 rows")


def test_evaluation_sets(errors: Errors, base: dict[str, Any], write_rows: Rows) -> None:
    good = base["prompt_data"]
    assert errors(eval_prompt_data=["a-1", good, "b_2", good, "c", f"{good}@[-1:]"]) == []
    # A name becomes a file's name and a metric's: found now, not at the first evaluation.
    one(errors(eval_prompt_data=["aime.2024", good]), "--eval-prompt-data aime.2024", "letters")
    assert any("two sets" in error for error in errors(eval_prompt_data=["a", good, "a", good]))
    other = write_rows([{"question": "x", "label": "2"}], "eval.jsonl")
    one(errors(eval_prompt_data=["a", str(other)]), f"--eval-prompt-data {other}: line 1", "--eval-input-key")
    assert errors(eval_prompt_data=["a", str(other)], eval_input_key="question") == []


def test_evaluation_sets_of_a_file(errors: Errors, base: dict[str, Any], tmp_path: Path, write_rows: Rows) -> None:
    other = write_rows([{"question": "x", "answer": "2"}], "eval.jsonl")
    keys = "input_key: question, label_key: answer"

    def found(*sets: str, **changes: Any) -> list[str]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text("eval: {datasets: [" + ", ".join("{" + one + "}" for one in sets) + "]}", encoding="utf-8")
        return errors(eval_config=str(path), **changes)

    good = f"name: a, path: {other}, {keys}"
    assert found(good, f"name: b, path: {base['prompt_data']}") == []
    alone = {"mode": "eval", "rm_type": None, "rollout_max_response_len": None}
    assert found(f"{good}, rm_type: f1, max_response_len: 9", **alone) == []
    one(found(good, mode="eval", rm_type=None), ".yaml: set a: ", "it has no reward")
    one(found(good, mode="eval", rollout_max_response_len=None), ".yaml: set a: ", "max_response_len")
    one(found(f"{good}, rm_type: exakt"), "set a: rm_type exakt: unknown", "exact")
    one(found(f"{good}, custom_rm_path: no_module.rm"), "set a: --custom-rm-path", "no_module")
    of_input, of_label = found(f"name: a, path: {other}")
    one([of_input], f"set a: {other}: line 1: column 'input' is missing", "input_key question?")
    one([of_label], f"set a: {other}: line 1: column 'label' is missing", "label_key answer?")
    one(found(good.replace("name: a", "name: a.b")), "set a.b: the name of a set has letters")
    one(found(good, eval_prompt_data=["a", str(other)]), "--eval-config", "--eval-prompt-data exclude each other")
    one(found(good, keep_checkpoints=1, keep_best="eval/b/accuracy", eval_interval=1), "it can be eval/a/accuracy")


MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "label_key", "part"),
    [
        ({"input": MESSAGES[:1]}, None, "without an assistant turn"),
        ({"input": "text"}, None, "--label-key"),
        ({"input": "text", "label": 4}, "label", "must be the response as text"),
    ],
)
def test_rows_that_sft_cannot_train_on(errors: Errors, write_rows: Rows, row: Any, label_key: Any, part: str) -> None:
    good: dict[str, Any] = {"input": MESSAGES, "label": "x"}
    data = write_rows([good, row], "sft.jsonl")
    one(errors(mode="sft", prompt_data=str(data), label_key=label_key), "line 2", part)
    assert errors(mode="sft", prompt_data=str(write_rows([good], "good.jsonl")), label_key=label_key) == []


def test_a_tokenizer_without_a_chat_template(
    errors: Errors, write_rows: Rows, tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("chat_template.*"))
    one(errors(hf_checkpoint=str(folder), apply_chat_template=True), "--apply-chat-template", str(folder))
    data = write_rows([{"input": MESSAGES}], "sft.jsonl")
    one(errors(hf_checkpoint=str(folder), mode="sft", prompt_data=str(data), label_key=None), "chat template")
    assert errors(apply_chat_template=True) == []


def test_replayed_rollouts_must_be_there(errors: Errors, write_rows: Rows, tmp_path: Path) -> None:
    template = str(tmp_path / "saved_{rollout_id}.jsonl")
    one(errors(debug_train_only=True, load_debug_rollout_data=template), "--load-debug-rollout-data", "saved_0.jsonl")
    write_rows([{}], "saved_0.jsonl")
    assert errors(debug_train_only=True, load_debug_rollout_data=template) == []
    assert errors(debug_train_only=True, load_debug_rollout_data=template, prompt_data=None) == []


def test_several_sets(base: dict[str, Any], errors: Errors, write_rows: Rows) -> None:
    good = base["prompt_data"]
    more = str(write_rows([{"input": f"{i}", "label": str(i)} for i in range(10)], "more.jsonl"))
    sets = [f"a={good}", f"b={more}@[2:8]"]
    checked, found = validate(Config.from_flat(base | {"prompt_data": sets, "prompt_data_weights": [0.7, 0.3]}))
    assert (checked.num_prompts, found) == (8, [])
    one(errors(prompt_data=sets, prompt_data_weights=[1]), "--prompt-data-weights 1.0", "1 weights for 2 sets")
    one(errors(prompt_data=sets, prompt_data_weights=[1, 0]), "--prompt-data-weights 1.0 0.0", "over 0")
    one(errors(prompt_data=[good, good]), "--prompt-data", "two sets have the name 'data'", "NAME=PATH")
    bad = str(write_rows([{"input": "x"}], "bad.jsonl"))
    one(errors(prompt_data=[good, bad]), "bad.jsonl: line 1: column 'label' is missing")


def test_epochs_are_counted_without_the_prompts_that_are_too_long(base: dict[str, Any], write_rows: Rows) -> None:
    data = str(write_rows([{"input": "x" * n, "label": "1"} for n in range(1, 11)], "lengths.jsonl"))
    flags = base | {"prompt_data": data, "rollout_max_prompt_len": 4}
    by_epochs = {name: value for name, value in flags.items() if name != "num_rollout"} | {"num_epoch": 1}
    assert validate(Config.from_flat(by_epochs))[0].num_prompts == 4
    checked, found = validate(Config.from_flat(by_epochs | {"prompt_data": f"{data}@[5:]"}))
    one(found, "no prompt is left (5 are over --rollout-max-prompt-len)")
    assert checked.num_prompts == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--pass-k 2", "--pass-k 2 has no effect without --advantage-estimator pass_at_k"),
        ("--advantage-estimator pass_at_k --pass-k 9", "--pass-k 9 is over --n-samples-per-prompt"),
        ("--policy-loss dpo --n-samples-per-prompt 1", "--policy-loss dpo compares answers to one prompt"),
        ("--policy-loss dpo --loss-aggregation token_mean", "--loss-aggregation token_mean: --policy-loss dpo"),
        ("--use-tis --tis-clip-low 3", "--tis-clip-low 3.0 must be below --tis-clip 2.0"),
        ("--use-tis --use-rollout-logprobs", "--use-rollout-logprobs excludes --use-tis"),
        ("--bootstrap-truncated", "--bootstrap-truncated has no effect without --advantage-estimator ppo"),
        ("--policy-loss dpo --normalize-advantages", "--normalize-advantages: --policy-loss dpo has no use"),
        ("--mode sft --loss-type custom_loss", "--loss-type custom_loss belongs to --mode rl, not to sft"),
        ("--advantage-estimator pass_at_k --length-penalty-coef 0.1", "pass_at_k counts right and wrong answers"),
        ("--use-unbiased-kl", "--use-unbiased-kl has no effect without --use-kl-loss"),
        ("--rejection-level token --rejection-low 5", "--rejection-low 5.0 must be below --rejection-high"),
        ("--use-routing-replay --mode sft", "--use-routing-replay has no effect in --mode sft"),
        ("--use-routing-replay --moe-router-fusion", "--moe-router-fusion leaves no place for it"),
        ("--use-routing-replay --moe-router-load-balancing-type sinkhorn", "sinkhorn chooses by all tokens"),
    ],
)
def test_flags_of_algorithms_that_do_not_go_together(flags: str, part: str) -> None:
    errors = validate(read_args(flags.split())[0])[1]
    assert any(part in error for error in errors), errors


def test_a_distance_that_weighs_nothing_is_told() -> None:
    measured = {"use_kl_loss": True, "n_samples_per_prompt": 2}
    (text,) = algorithm_warnings(Config.from_flat(measured))
    assert text.startswith("--use-kl-loss without --kl-loss-coef: ")
    for values in ({"kl_loss_coef": 0.1}, {"mode": "sft"}, {"loss_type": "sft_loss"}):
        assert algorithm_warnings(Config.from_flat(measured | values)) == [], values


def test_messages_without_a_template_are_for_functions(errors: Errors, write_rows: Rows) -> None:
    rows = write_rows([{"input": MESSAGES[:1], "label": "2"}], "messages.jsonl")
    data = {"prompt_data": str(rows), "apply_chat_template": False}
    one(errors(**data), "is a list of messages: add --apply-chat-template")
    assert errors(**data, rollout_function_path="tests/e2e/slime_unchanged.py:rollout") == []
    assert errors(**data, eval_prompt_data=["m", str(rows)], custom_generate_function_path=GENERATE, rm_type=None) == []
    for num_rows in (2, 1500):  # without a template nobody here knows how long they become
        many = str(write_rows([{"input": MESSAGES[:1], "label": "2"}] * num_rows))
        assert errors(prompt_data=many, custom_generate_function_path=GENERATE, rollout_max_prompt_len=1) == []


def test_the_fewest_bytes_may_not_be_the_fewest_tokens(
    errors: Errors, write_rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is refused only where no row fits; many rows are not tokenized for it."""
    rows = str(write_rows([{"input": "x" * (n + 500), "label": "2"} for n in range(1500)]))
    monkeypatch.setattr("fusionrl.checks.data.load_prompts", None)
    one(errors(prompt_data=rows, rollout_max_prompt_len=499), "no prompt is left: the shortest are over", "-len 499")
    assert errors(prompt_data=rows, rollout_max_prompt_len=500) == []
    monkeypatch.setattr("fusionrl.checks.data.count_tokens", lambda row, *_: 3 if len(row["input"]) == 1000 else 9)
    assert errors(prompt_data=rows, rollout_max_prompt_len=3) == []
    one(errors(prompt_data=rows, rollout_max_prompt_len=2), "no prompt is left")


def test_a_group_of_one_that_trains_nothing_is_told() -> None:
    one = {"n_samples_per_prompt": 1}
    for estimator in OF_GROUPS:
        (text,) = algorithm_warnings(Config.from_flat(one | {"advantage_estimator": estimator}))
        assert text.startswith(f"--n-samples-per-prompt 1 with --advantage-estimator {estimator}: ")
    others = ({"n_samples_per_prompt": 2}, {"mode": "sft"}, {"use_opd": True}, {"disable_rewards_normalization": True})
    estimators = ({"advantage_estimator": name} for name in ("ppo", "remax", "reinforce_plus_plus", "prime"))
    for other in (*others, *estimators, {"custom_generate_function_path": "mine.py:several"}):
        assert algorithm_warnings(Config.from_flat(one | other)) == [], other


def test_quantised_weights(errors: Errors, base: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """Refused where weights would be pushed in a form that is not known; engines alone serve what SGLang serves."""
    folder = shutil.copytree(tiny_model, tmp_path / "awq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    one(errors(hf_checkpoint=str(folder)), f"--hf-checkpoint {folder}", "quant_method 'awq'", "give the bf16 checkpoi")
    one(errors(ref_load=str(folder), use_kl_loss=True), f"--ref-load {folder}", "quant_method 'awq'")
    assert errors(hf_checkpoint=str(folder), mode="eval", eval_prompt_data=["one", base["prompt_data"]]) == []
    args = Config.from_flat(base, PassThrough(sglang={"quantization": "fp8"}))
    one(validate(args)[1], "--sglang-quantization fp8", "leave it out")
    make_fp8(tiny_model, tmp_path / "fp8", (16, 16))
    checked, found = validate(Config.from_flat(base | {"hf_checkpoint": str(tmp_path / "fp8")}))
    assert found == []
    assert checked.quantization is not None and len(checked.quantization.names) == 14


def test_weight_pushes_by_files(errors: Errors, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = {"update_weight_transport": "disk"}
    delta = disk | {"update_weight_mode": "delta"}
    assert errors(**disk) == errors(**delta, update_weight_local_checkpoint_dir="/local") == []
    one(errors(**disk, update_weight_delta_encoding="overwrite"), "no effect without --update-weight-mode delta")
    one(errors(**delta), "--update-weight-mode delta needs --update-weight-local-checkpoint-dir: a folder on each host")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = errors(**delta, update_weight_local_checkpoint_dir="/local", update_weight_delta_checksum="blake3")
    for start in ("--update-weight-delta-checksum blake3: the package", "--update-weight-mode delta: the package zst"):
        assert sum(error.startswith(start) for error in found) == 1


@pytest.mark.parametrize("field", ["run_dir", "save_hf", "save_debug_rollout_data", "reject_sampling_output"])
def test_a_path_that_cannot_be_made_is_refused_before_the_run(
    errors: Errors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """The Hugging Face folder is written at the end: without a checkpoint its failure loses the run."""
    flag, end = "--" + field.replace("_", "-"), "/{rollout_id}.pt" if "debug" in field else "/new"
    (tmp_path / "file").touch()
    found = errors(**{field: f"{tmp_path}/file{end}"})
    one([error for error in found if flag in error], f"{tmp_path}/file is a file", "name another path")
    assert not [error for error in errors(**{field: f"{tmp_path}/deep{end}"}) if "another path" in error]
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    assert f"{tmp_path} cannot be written" in str(unwritable(flag, tmp_path / "deep/new"))


def test_a_folder_of_save_hf_that_exists_is_refused_before_the_run(errors: Errors, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model-1").mkdir()
    one(errors(save_hf=f"{tmp_path}/model"), f"--save-hf {tmp_path}/model: it exists already; give another folder")
    one(errors(save_hf=f"{tmp_path}/model-{{rollout_id}}", num_rollout=2), f"--save-hf {tmp_path}/model-1: it exists")
    assert errors(save_hf=f"{tmp_path}/model-{{rollout_id}}", num_rollout=3) == []


def test_a_resume_keeps_the_folder_of_save_hf_that_the_run_wrote_before_it_died(errors: Errors, tmp_path: Path) -> None:
    """Not one with the weights of another step, one that the run trains again, another folder, or after the end."""
    run, folder = tmp_path / "run", tmp_path / "model"
    with RunDir(run) as made:
        made.write_config({})
    folder.mkdir()
    flags: dict[str, Any] = {"save_hf": str(folder), "run_dir": str(run), "resume": True, "num_rollout": 2}
    refused = f"--save-hf {folder}: it exists already"
    one(errors(**flags), refused)
    note_export(run, folder, 1)
    one(errors(**flags), refused)
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    assert errors(**flags) == []
    of_epochs = flags | {"num_rollout": None}
    assert errors(**of_epochs, num_epoch=1) == [], "how many steps that is the data tell"
    config = Config.from_flat(of_epochs)
    assert export_errors(config, 2) == [] and refused in " ".join(export_errors(config, 4)), "and then"
    one(errors(**flags | {"num_rollout": 3}), refused)
    assert refused in " ".join(errors(**flags | {"resume": False}))
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    one(errors(**flags), refused)
    folder.rmdir()
    (tmp_path / "moved").rename(folder)
    assert errors(**flags) == []
    forget_export(run)
    one(errors(**flags), refused)


def test_the_plan_finds_what_a_template_refuses(
    errors: Errors, tiny_model: Path, tmp_path: Path, write_rows: Rows
) -> None:
    strict = shutil.copytree(tiny_model, tmp_path / "strict")
    refuses = "{% if messages | length > 1 %}{{ raise_exception('one message alone') }}{% endif %}"
    (strict / "chat_template.jinja").write_text(refuses + "{{ messages[0].content }}")
    rows = [{"input": MESSAGES[:1] * (1 + number % 2), "label": "2"} for number in range(100)]
    flags = {"prompt_data": str(write_rows(rows, "chats.jsonl")), "apply_chat_template": True}
    assert errors(**flags) == []
    where = f"--prompt-data {flags['prompt_data']}: column 'input': the chat template of {strict} refuses it"
    one(errors(**flags, hf_checkpoint=str(strict)), where, "one message alone", "in 50 of 100 rows (lines 2, 4, 6, …")


def test_the_plan_warns_of_special_tokens_and_refuses_them_where_no_mask_can_be_made(
    base: dict[str, Any], write_rows: Rows
) -> None:
    def chat(question: str, answer: str) -> dict[str, Any]:
        return {"input": [MESSAGES[0] | {"content": question}, MESSAGES[1] | {"content": answer}], "label": ""}

    sft = base | {"mode": "sft", "n_samples_per_prompt": 1}
    del sft["rm_type"]
    quoted = str(write_rows([chat("1+1=", "2"), chat("what is <|im_end|>?", "a marker")], "quoted.jsonl"))
    checked, found = validate(Config.from_flat(sft | {"prompt_data": quoted}))
    assert found == []
    one(list(checked.data_warnings), "quoted.jsonl: line 2: ", "special token of the tokenizer", "'<|im_end|>'")
    broken = str(write_rows([chat("1+1=", "2"), chat("1+2=", "3<|im_end|><|im_end|>")], "broken.jsonl"))
    one(validate(Config.from_flat(sft | {"prompt_data": broken}))[1], "broken.jsonl: line 2: ", "end marker")
