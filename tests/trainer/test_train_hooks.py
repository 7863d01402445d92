"""A user's functions in the trainers: what they get, what they may change, and what is said of their mistakes."""

import numpy as np
import pytest

from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.plan.layout import TrainerLayout
from tests.trainer import trainer_worker
from tests.trainer.forked_program import ForkedProgram
from tests.trainer.test_parallel import assert_same, history
from tests.trainer.trainer_worker import Failed, Samples, config_of

HOOKS = "tests/trainer/train_hooks.py"
CUSTOM = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}:ppo_with_kl"}


@pytest.mark.parametrize(("sizes", "per_token"), [*(({x: 2}, True) for x in ("tp", "pp", "cp")), ({}, False)], ids=str)
def test_a_custom_loss_has_the_gradients_of_the_same_built_in_one(workers, hf, sizes, per_token):
    folder, _ = hf("qwen3", False, vocab_size=121)
    samples = Samples(5, seed=41, vocab=121, share=2)
    values = {"steps": 2, "calculate_per_token_loss": per_token}
    built_in = history(workers, folder, samples, TrainerLayout(1), **values)
    custom = history(workers, folder, samples, TrainerLayout(2, **sizes), micro=2, **values, **CUSTOM)
    # A custom loss's own metrics are means over steps; the built-in kl_loss and entropy are pooled over tokens.
    shown = ("train/loss", "train/pg_loss", "train/grad_norm")
    for metrics, others in zip(custom[0], built_in[0], strict=True):
        wanted = {name: others[name] for name in shown}
        assert {name: metrics[name] for name in shown} == pytest.approx(wanted, rel=1e-5, abs=3e-6)
    assert_same(([], custom[1]), ([], built_in[1]), 1e-5)


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"), [({"tp": 2}, True), ({"tp": 2}, False), ({"cp": 2}, True)], ids=str
)
def test_a_custom_loss_without_starts_finds_its_samples(workers, hf, sizes, sequence_parallel):
    folder, _ = hf("qwen3", False, vocab_size=121)
    samples, layout = Samples(5, seed=43, vocab=121, share=2), TrainerLayout(2, **sizes)
    assert (samples.total[:-1] % 2).any() and (samples.total[:-1] % 4).any(), "some must be padded"
    built_in = history(workers, folder, samples, TrainerLayout(1))
    as_in_slime = {**CUSTOM, "custom_loss_function_path": f"{HOOKS}:ppo_as_in_slime"}
    passthrough = {} if sequence_parallel else {"transformer": {"sequence_parallel": False}}
    custom = history(workers, folder, samples, layout, passthrough=passthrough, **as_in_slime)
    for name in ("train/grad_norm", "train/kl_loss", "train/entropy"):
        assert [x[name] for x in custom[0]] == pytest.approx([x[name] for x in built_in[0]], rel=1e-5)
    assert_same(([], custom[1]), ([], built_in[1]), 1e-5)


def test_metadata_and_columns_reach_a_custom_loss(workers, hf):
    workers.start(config_of(hf("llama", True)[0], **CUSTOM | {"custom_loss_function_path": f"{HOOKS}:knows_its_data"}))
    (shard,) = Samples(5, seed=43).shards()
    lengths = shard.response_lengths.tolist()
    shard.metadata, shard.extra = [{"note": {"length": n}} for n in lengths], {"weight_of_mine": lengths}
    assert workers.train([shard])["train/seen"] == 2.0  # micro-batches


def test_advantages_and_masks_of_a_user(workers, hf):
    folder, _ = hf("llama", True)
    samples, values = Samples(6, seed=44), {"use_kl_loss": False}
    path = {"custom_advantage_function_path": f"{HOOKS}:doubled"}
    by_hook = history(workers, folder, samples, TrainerLayout(2), **values, **path)
    samples.rewards = samples.rewards * 2
    assert_same(by_hook, history(workers, folder, samples, TrainerLayout(1), **values), 1e-6)
    path = {"rollout_data_postprocess_path": f"{HOOKS}:only_first_halves"}
    by_hook = history(workers, folder, samples, TrainerLayout(2), steps=2, **values, **path)
    for mask in samples.mask:
        mask[(mask.size + 1) // 2 :] = 0
    assert_same(by_hook, history(workers, folder, samples, TrainerLayout(1), steps=2, **values), 1e-6)


def test_a_sample_that_a_users_function_masks_still_counts(workers, hf):
    folder, _ = hf("llama", True)
    samples, values = Samples(6, seed=45), {"use_kl_loss": False, "entropy_coef": 0.0}
    values |= {"loss_aggregation": "sequence_mean"}
    path = {"rollout_data_postprocess_path": f"{HOOKS}:masks_the_third"}
    by_hook = history(workers, folder, samples, TrainerLayout(2), **values, **path)
    samples.rewards[2] = 0.0  # its advantage, and so its part of the loss
    assert_same(([], by_hook[1]), ([], history(workers, folder, samples, TrainerLayout(1), **values)[1]), 1e-6)
    assert (by_hook[0][0]["train/num_samples"], by_hook[0][0]["train/masked_samples"]) == (6, 1)


@pytest.mark.parametrize(
    ("flag", "function", "message"),
    [
        ("advantage_function", "forgets", "it left no 'advantages'"),
        ("advantage_function", "too_short", r"'advantages' has \d+ values for \d+ response"),
        ("advantage_function", "raises", "KeyError: 'mine'"),
        ("data_postprocess", "raises", "KeyError: 'mine'"),
        ("data_postprocess", "unmasks", "'loss_masks' has a token that was masked"),
        ("data_postprocess", "other_rewards", "'rewards' may not change here"),
        ("loss_function", "raises", "KeyError: 'mine'"),
        ("loss_function", "no_tuple", r"it returned Tensor; expected \(loss, dict of metrics\)"),
        ("loss_function", "no_gradient", "its loss must be a tensor of one element with a gradient"),
        ("loss_function", "ppo_of_some", r"do not fill the packed row of \d+; .* give starts="),
        ("loss_function", "raises_in_backward", "a user's code in a trainer: KeyError: 'mine'"),
        ("policy_loss", "a_mean", r"its losses must be a tensor of the shape \(\d+,\)"),
        ("policy_loss", "bare", r"it returned Tensor; expected \(losses of tokens, dict of"),
        ("policy_loss", "raises", "KeyError: 'mine'"),
        ("tis_function", "wrong_shape", r"its pg_loss must be a tensor of the shape \(\d+,\)"),
        ("tis_function", "raises", "KeyError: 'mine'"),
        ("pg_loss_reducer_function", "doubled_number", "it returned no function"),
        ("pg_loss_reducer_function", "makes_what_raises", "KeyError: 'mine'"),
        ("megatron_before_log_prob_hook", "raises", "'mine'"),
        ("megatron_before_train_step_hook", "raises", "'mine'"),
        ("model_provider", "raises_in_forward", "a user's code in a trainer: KeyError: 'mine'"),
    ],
)
def test_mistakes_name_flag_and_function(workers, hf, flag, function, message):
    """A user's own error is shown with its line wherever the code runs: also in a function that a hook returned."""
    name = f"{'rollout' if flag == 'data_postprocess' else 'custom'}_{flag}_path"
    values = {name: f"{HOOKS}:{function}", "use_kl_loss": "log_prob" in flag}
    if flag == "loss_function":
        values["loss_type"] = "custom_loss"
    workers.start(config_of(hf("llama", True)[0], **values))
    if not message.startswith("a user's"):
        message = f"--{name.replace('_', '-')} .*{function}.*{message}"
    with pytest.raises(Failed, match=message) as caught:
        workers.train(Samples(6, seed=45).shards())
    if "mine" in message:
        _, where, code, *samples = caught.value.message.splitlines()
        assert f'/{HOOKS}", line ' in where and code == '    raise KeyError("mine")'
        if function == "raises" and "tis" not in flag:
            at = "0, 1, 2" if "loss" in flag else "0, 1, 2, 3, 4, 5"
            assert samples == ([] if "megatron" in flag else [f"the samples that it was at: {at}"])


def test_the_file_of_the_rollout_is_named(workers, hf, tmp_path):
    """Its samples have prompt, answer and reward: a shard has tokens alone."""
    workers.start(config_of(hf("llama", True)[0], **CUSTOM | {"custom_loss_function_path": f"{HOOKS}:raises"}))
    workers.run(setattr, "run_dir", str(tmp_path))
    writer = RolloutWriter(tmp_path)
    paths = {(number, attempt): writer.write(number, attempt, []) for number, attempt in ((3, 1), (3, 2), (4, 1))}
    with pytest.raises(Failed) as caught:
        workers.train(Samples(6, seed=45).shards(), rollout_id=3)
    assert caught.value.message.splitlines()[-1] == f"the samples that it was at: 0, 1, 2, in {paths[3, 2]}"


def test_megatrons_objects_are_handed_out(workers, hf, tmp_path):
    names = ("init_path", "before_log_prob_hook_path", "before_train_step_hook_path")
    values = {f"custom_megatron_{name}": f"{HOOKS}:say" for name in names}
    passthrough = {"custom": {"seen": str(tmp_path / "seen")}}
    workers.start(config_of(hf("llama", True)[0], use_kl_loss=True, passthrough=passthrough, **values))
    workers.train(Samples(4, seed=46).shards(steps=2), rollout_id=7)
    seen = ["", " list 'ref_'", " list ''"]
    seen += [f" 7 {step} list ChainedOptimizer OptimizerParamScheduler" for step in (0, 1)]
    assert (tmp_path / "seen").read_text().splitlines() == [f"HookArgs{words}" for words in seen]


@pytest.mark.parametrize(
    "flag",
    [{"custom_model_provider_path": f"{HOOKS}:plain_gpt"}]
    + [{"custom_spec_path": f"{HOOKS}:{name}"} for name in ("layer_spec", "spec_provider")],
    ids=str,
)
def test_a_model_of_a_users_own(workers, hf, flag):
    """Its log-probs are those of the usual model; what it does not train stays; it is pushed under the usual names.

    --custom-spec-path is slime's --spec: the layers' spec, or a function that builds a stage of the pipeline.
    """
    folder, _ = hf("llama", True)
    layout, (shard,) = TrainerLayout(2, pp=2), Samples(4, seed=47).shards()
    workers.start(config_of(folder), layout)
    usual = workers.call("score", shard)[0]
    before = workers.run(trainer_worker.weights)[0]
    workers.start(config_of(folder, **flag), layout)
    assert all(np.abs(a - b).max() < 1e-6 for a, b in zip(workers.call("score", shard)[0], usual, strict=True))
    workers.train([shard])
    after = workers.run(trainer_worker.weights)[0]
    kept = {name for name, tensor in before.items() if np.array_equal(after[name], tensor)}
    not_trained = {f"model.layers.0.{name}.weight" for name in ("input_layernorm", "mlp.down_proj")}
    assert kept == (not_trained if "custom_model_provider_path" in flag else set()), "hooks of weights see gradients"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"custom_megatron_init_path": "raises"}, "raises: KeyError: 'mine'"),
        ({"custom_model_provider_path": "raises"}, "raises: KeyError: 'mine'"),
        ({"custom_model_provider_path": "no_model"}, "no_model: it returned Linear; expected Megatron's GPTModel"),
        ({"custom_spec_path": "returns_nothing"}, "returns_nothing: it returned NoneType; expected Megatron's"),
        ({"custom_spec_path": "builds_none"}, "builds_none: it returned int; expected Megatron's GPTModel"),
        # The spec function runs once a stage and before the provider, which may use what it has prepared.
        ({"custom_spec_path": "no_spec", "custom_model_provider_path": "no_model"}, "no_spec: it returned int; exp"),
    ],
    ids=str,
)
def test_mistakes_of_the_start_name_flag_and_function(workers, hf, names, message):
    flag = f"--{next(iter(names)).replace('_', '-')}"
    with pytest.raises(Failed, match=f"{flag} {HOOKS}:{message}"):
        workers.start(config_of(hf("llama", True)[0], **{field: f"{HOOKS}:{name}" for field, name in names.items()}))


def test_the_hook_before_the_model_comes_before_its_imports(forkserver, tmp_path) -> None:
    """--custom-megatron-init-path may replace functions of Megatron; `trainer.model` binds them when it is imported."""
    code = (
        "import sys; [sys.modules.pop(name) for name in list(sys.modules) if name.startswith('fusionrl')];"
        "import fusionrl.trainer.train_hooks, fusionrl.trainer.model_rank;"
        "sys.exit('fusionrl.trainer.model' in sys.modules)"
    )
    assert ForkedProgram(["-c", code], tmp_path).wait(60).returncode == 0
