"""The user-level functions of miles' examples and hubs, and how each is run; see `from_slime_cases`.

The list has each function of examples/ that a flag, or a setting like one, names in the launch files, docs or READMEs
of miles, and each function of miles/rollout that a launch file names. A list of tools counts as a function.
"""

import contextlib
import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator, Sequence

from from_miles_stubs import OMEGACONF, STRANDS, TBENCH2
from from_slime_cases import (
    EVAL,
    FIGURE,
    GEO3K,
    Case,
    Outcome,
    Site,
    counted,
    metric,
    more_samples,
    response,
    retriever,
    teacher,
)
from from_slime_stubs import QWEN_VL_UTILS, TAU_BENCH, StubServer

_X = "{slime}/examples/experimental/"
_SEARCH = f"{_X}search-r1/generate_with_search.py"
_STRANDS = f"{_X}strands_sglang/generate_with_strands.py"
_AGENTS = f"{_X}multi_agent/rollout_with_multi_agents.py"
_MIS = "{slime}/examples/infra_features/train_infer_mismatch_helper/mis"
_RM = "{slime}/examples/on_policy_distillation/qwen3_5_35b_selfdistill/rm.py"
_RETOOL = "{slime}/examples/retool_v2/tool_sandbox.py"
_GEO3K = "{slime}/examples/geo3k_vlm/"
_SWE = "{slime}/examples/swe-agent-harbor-docker/"
_OPD = "miles.rollout.on_policy_distillation"
_FILTERS = "miles.rollout.filter_hub.dynamic_sampling_filters"
_AGENTIC = "miles.rollout.generate_hub.agentic_tool_call.generate"
_MESSAGES = {"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "label": "7"}
_DRIVEN = ("--custom-generate-function-path", _AGENTIC, "--apply-chat-template")

Evidence = tuple[str, Callable[[Outcome], bool]]


def _ask(base_url: str) -> str:
    """Ask the model one question as an agent's server does, and return its answer."""
    body = {"model": "model", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"] or ""


@contextlib.contextmanager
def _nemo_gym(site: Site) -> Iterator[list[str]]:
    """A server of episodes; its first one fails before it sends a request to the model."""

    def answer(request: dict) -> dict:
        if server.num_requests == 0:
            return {"reward": 0.0}
        return {"reward": float("7" in _ask(request["policy_base_url"])), "metadata": {"resolved": True}}

    server = StubServer("/run", answer)
    site.env["NEMO_GYM_URL"] = server.url.removesuffix("/run")
    site.counts["episodes"] = lambda: server.num_requests
    try:
        yield []
    finally:
        server.close()


@contextlib.contextmanager
def _harbor(site: Site) -> Iterator[list[str]]:
    def answer(request: dict) -> dict:
        text = _ask(request["base_url"])
        return {"reward": float("7" in text), "exit_status": "Submitted", "agent_metrics": {"turns": 1}}

    server = StubServer("/run", answer)
    site.env["AGENT_SERVER_URL"] = server.url.removesuffix("/run")
    site.counts["trials"] = lambda: server.num_requests
    try:
        yield []
    finally:
        server.close()


@contextlib.contextmanager
def _skills(site: Site) -> Iterator[list[str]]:
    """A server of evaluations, and a file with its address and a set of the run's own."""
    server = StubServer("/evaluate", lambda request: {"raw_metrics": {request["benchmarks"][0]["name"]: {"pass": 0.5}}})
    site.counts["evaluations"] = lambda: server.num_requests
    path, rows = site.folder / "sets.yaml", site.folder / "held.jsonl"
    rows.write_text(json.dumps({"prompt": "What is 3 + 4?", "label": "7"}) + "\n", encoding="utf-8")
    delegate = {"name": "skills", "url": server.url, "datasets": [{"name": "skill_bench"}]}
    config = {"eval": {"datasets": [{"name": "held", "path": str(rows)}], "delegate": [delegate]}}
    path.write_text(json.dumps(config), encoding="utf-8")
    try:
        yield ["--eval-config", str(path), "--eval-interval", "1"]
    finally:
        server.close()


@contextlib.contextmanager
def _teacher_model(site: Site) -> Iterator[list[str]]:
    """Another model as the teacher, and an evaluation set whose samples are scored in another way."""
    import torch
    from transformers import AutoModelForCausalLM

    student, folder = site.folder.parent / "model", site.folder / "teacher"
    shutil.copytree(student, folder)
    model = AutoModelForCausalLM.from_pretrained(student)
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight += 0.05 * torch.randn_like(model.lm_head.weight)
    model.save_pretrained(folder)
    path, rows = site.folder / "sets.yaml", site.folder / "held.jsonl"
    rows.write_text(json.dumps({"prompt": "What is 3 + 4?", "label": "7"}) + "\n", encoding="utf-8")
    held = {"name": "held", "path": str(rows), "n_samples_per_eval_prompt": 32}
    held["metadata_overrides"] = {"opd_reward_mode": "eval_math"}
    path.write_text(json.dumps({"eval": {"datasets": [held]}}), encoding="utf-8")
    yield ["--opd-teacher-load", str(folder), "--eval-config", str(path), "--eval-interval", "1"]


def _environment(**variables: str) -> Callable[[Site], contextlib.AbstractContextManager[list[str]]]:
    @contextlib.contextmanager
    def given(site: Site) -> Iterator[list[str]]:
        site.env |= variables
        yield []

    return given


def _of_groups(words: str, holds: Callable[[list[dict]], bool]) -> Evidence:
    """Evidence that holds for the samples of each group that was trained on."""

    def shown(outcome: Outcome) -> bool:
        groups: dict[int, list[dict]] = {}
        for sample in outcome.samples:
            groups.setdefault(sample["group_index"], []).append(sample)
        return bool(groups) and all(holds(group) for group in groups.values())

    return words, shown


def _value(name: str, words: str, holds: Callable[[float], bool]) -> Evidence:
    """Evidence that holds for each value of a metric."""

    def shown(outcome: Outcome) -> bool:
        values = [row[name] for row in outcome.metrics if name in row]
        return bool(values) and all(holds(value) for value in values)

    return f"{name} {words}", shown


def _of(file: str, *functions: str) -> tuple[str, ...]:
    return tuple(f"{file.removeprefix('{slime}/')}: {function}" for function in functions)


MILES_CASES: Sequence[Case] = (
    Case(
        "search-r1",
        _of(_SEARCH, "generate", "reward_func"),
        (
            *("--custom-generate-function-path", f"{_SEARCH}:generate"),
            *("--custom-rm-path", f"{_SEARCH}:reward_func", *EVAL),
        ),
        row={"prompt": "Who was it?", "label": {"ground_truth": {"target": ["7"]}}},
        server=retriever,
        evidence=(counted("searches"), response("<information>")),
    ),
    Case(
        "strands",
        _of(_STRANDS, "generate", "reward_func"),
        (
            *("--custom-generate-function-path", f"{_STRANDS}:generate", "--custom-rm-path", f"{_STRANDS}:reward_func"),
            *("--router-api-key", "none"),
        ),
        packages=STRANDS,
        evidence=(more_samples(32), response("result of the program: 7")),
    ),
    Case(
        "multi-agent",
        (
            *_of(_AGENTS, "generate_with_multi_agents"),
            "examples/experimental/multi_agent/agent_system.py: run_agent_system",
        ),
        ("--custom-generate-function-path", f"{_AGENTS}:generate_with_multi_agents", "--rm-type", "math", *EVAL),
        num_rows=4,
        evidence=(more_samples(2 * 16 * 6),),
    ),
    Case(
        "mis",
        _of(f"{_MIS}.py", "compute_mis_weights_with_cp"),
        (
            *("--custom-config-path", f"{_MIS}.yaml", "--use-tis", "--rm-type", "math"),
            *("--custom-tis-function-path", f"{_MIS}.py:compute_mis_weights_with_cp"),
            *("--actor-num-gpus-per-node", "2", "--context-parallel-size", "2"),
        ),
        evidence=(metric("mis_is_ratio_mean_final"),),
    ),
    Case(
        "mis-fsdp",
        _of(f"{_MIS}.py", "compute_mis_weights_fsdp"),
        (
            *("--custom-config-path", f"{_MIS}.yaml", "--use-tis", "--rm-type", "math"),
            *("--custom-tis-function-path", f"{_MIS}.py:compute_mis_weights_fsdp"),
        ),
        evidence=(metric("mis_is_ratio_mean_final"),),
    ),
    Case(
        "self-distillation",
        _of(_RM, "reward_func"),
        ("--custom-rm-path", f"{_RM}:reward_func"),
        evidence=(_value("rollout/raw_reward", "between 0 and 1", lambda mean: 0 < mean < 1),),
    ),
    Case(
        "self-distillation-pure",
        _of(_RM, "reward_func_pure_opd"),
        ("--custom-rm-path", f"{_RM}:reward_func_pure_opd", "--use-opd", "--opd-type", "megatron"),
        server=_teacher_model,
        evidence=(
            _value("rollout/raw_reward", "0", lambda mean: mean == 0),
            _value("eval/held/reward", "above 0", lambda mean: mean > 0),
            metric("train/opd_kl"),
        ),
    ),
    Case(
        "on-policy-distillation",
        (f"{_OPD}.reward_func", f"{_OPD}.post_process_rewards"),
        (
            *("--custom-rm-path", f"{_OPD}.reward_func", "--use-opd", "--opd-type", "sglang", "--opd-kl-coef", "1.0"),
            *("--custom-reward-post-process-path", f"{_OPD}.post_process_rewards"),
        ),
        server=teacher,
        evidence=(counted("scored", 8), metric("opd")),
    ),
    Case(
        "retool",
        ("miles.rollout.generate_hub.multi_turn.generate", *_of(_RETOOL, "tool_specs", "execute_tool", "reward_func")),
        (
            *("--custom-generate-function-path", "miles.rollout.generate_hub.multi_turn.generate"),
            *("--custom-rm-path", f"{_RETOOL}:reward_func", "--reward-key", "score", "--apply-chat-template"),
        ),
        row=_MESSAGES,
        config=f"generate_tool_specs_path: {_RETOOL}:tool_specs\n"
        f"generate_execute_tool_function_path: {_RETOOL}:execute_tool\n"
        "generate_tool_call_parser: qwen25\ngenerate_max_turns: 3\n",
        evidence=(response("Output:\n7"),),
    ),
    Case(
        "nemo-gym",
        (
            *_of(f"{_X}nemo-gym/nemogym_agent_function.py", "run"),
            *_of(f"{_X}nemo-gym/nemogym_generate.py", "reward_func"),
            _AGENTIC,
            f"{_FILTERS}.check_no_aborted",
        ),
        (
            *(*_DRIVEN, "--custom-rm-path", f"{_X}nemo-gym/nemogym_generate.py:reward_func"),
            *("--dynamic-sampling-filter-path", f"{_FILTERS}.check_no_aborted"),
        ),
        row=_MESSAGES,
        config=f"custom_agent_function_path: {_X}nemo-gym/nemogym_agent_function.py:run\n",
        server=_nemo_gym,
        evidence=(counted("episodes", 40), metric("dropped_group_has_aborted")),
    ),
    Case(
        "openenv",
        (
            *_of(f"{_X}openenv/openenv_agent_function.py", "run"),
            *_of(f"{_X}openenv/openenv_generate.py", "reward_func"),
        ),
        (*_DRIVEN, "--custom-rm-path", f"{_X}openenv/openenv_generate.py:reward_func"),
        row=_MESSAGES,
        packages=TBENCH2,
        config=f"custom_agent_function_path: {_X}openenv/openenv_agent_function.py:run\n",
        server=_environment(OPENENV_MAX_TURNS="2"),
        evidence=(response("ran it in the shell"),),
    ),
    Case(
        "swe-agent",
        _of(f"{_SWE}swe_agent_function.py", "run") + _of(f"{_SWE}generate.py", "reward_func", "RolloutFn"),
        (
            *(*_DRIVEN, "--custom-rm-path", f"{_SWE}generate.py:reward_func"),
            *("--rollout-function-path", f"{_SWE}generate.py:RolloutFn"),
        ),
        row=_MESSAGES,
        config=f"custom_agent_function_path: {_SWE}swe_agent_function.py:run\n",
        server=_harbor,
        evidence=(counted("trials", 32), metric("agent/turns_mean")),
    ),
    Case(
        "tau-bench",
        (*_of(f"{_X}tau-bench/generate_with_tau.py", "generate"), f"{_FILTERS}.check_reward_nonzero_std"),
        (
            *("--custom-generate-function-path", f"{_X}tau-bench/generate_with_tau.py:generate"),
            *("--dynamic-sampling-filter-path", f"{_FILTERS}.check_reward_nonzero_std"),
            *("--hook-env", "GEMINI_API_KEY"),
        ),
        row={"prompt": "{number}", "label": ""},
        packages=TAU_BENCH,
        server=_environment(GEMINI_API_KEY="none"),
        evidence=(
            more_samples(32),
            _of_groups("rewards differ in each group", lambda group: len({sample["reward"] for sample in group}) > 1),
        ),
        exact=False,  # it makes tokens of the engines' text
    ),
    Case(
        "dr-grpo",
        _of(f"{_X}DrGRPO/custom_reducer.py", "get_pg_loss_reducer"),
        (
            *("--custom-pg-loss-reducer-function-path", f"{_X}DrGRPO/custom_reducer.py:get_pg_loss_reducer"),
            *("--rm-type", "math", "--no-calculate-per-token-loss"),  # the default of miles
        ),
        # Sums of tokens by a constant of 1000: far below what means by the length of these answers give.
        evidence=(_value("train/grad_norm", "below 0.02", lambda norm: norm < 0.02),),
    ),
    Case(
        "eval-delegate",
        _of(f"{_X}eval/eval_delegate_rollout.py", "generate_rollout"),
        ("--eval-function-path", f"{_X}eval/eval_delegate_rollout.py:generate_rollout", "--rm-type", "math"),
        packages=OMEGACONF,
        server=_skills,
        evidence=(counted("evaluations", 2), metric("skill_bench/pass"), metric("eval/held/reward")),
    ),
    Case(
        "sft",
        ("miles.rollout.sft_rollout.generate_rollout",),
        (
            *("--mode", "sft", "--rollout-function-path", "miles.rollout.sft_rollout.generate_rollout"),
            *("--n-samples-per-prompt", "1", "--rollout-batch-size", "8"),
        ),
        row={"prompt": [*_MESSAGES["prompt"], {"role": "assistant", "content": "It is seven."}], "label": ""},
        evidence=(_value("train/loss", "above 1", lambda loss: loss > 1),),
    ),
    Case(
        "random-output-length",
        ("miles.rollout.generate_hub.benchmarkers.generate_with_random_osl",),
        (
            *("--custom-generate-function-path", "miles.rollout.generate_hub.benchmarkers.generate_with_random_osl"),
            *("--rollout-max-context-len", "14", "--rm-type", "math"),
        ),
        evidence=(
            _of_groups(
                "each answer goes on to the limit",
                lambda group: {sample["status"] for sample in group} == {"truncated"},
            ),
        ),
    ),
    Case(
        "fully-async",
        ("miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",),
        ("--rollout-function-path", "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn", "--rm-type", "math"),
        evidence=(more_samples(32),),
    ),
    Case(
        "random-async",
        _of("examples/infra_features/random_async/random_async_rollout.py", "generate_rollout_random_async"),
        skip="it draws ids of a vocabulary of 151,643 and contexts of thousands of tokens, too many for two CPU cores",
    ),
    Case(
        "formal-math",
        _of(f"{_X}formal_math/single_round/reward_fn.py", "reward_fn"),
        skip="the reward starts Docker containers with Lean through the run's Ray, to which reward processes have no"
        " access; start one server, and ask it from the reward",
    ),
    Case(
        "verifiers",
        _of(f"{_X}verifiers/verifiers_rollout.py", "VerifiersRolloutFn"),
        skip="it needs `verifiers` 0.2.0, with its renderers; environments of 0.3.1 are run by"
        " plugins/agents/verifiers_env.py (docs/guides/agents.md)",
    ),
    Case(
        "external-evaluation",
        _of("examples/infra_features/fully_async/external_eval_fn.py", "ExternalSglangEvalFn"),
        skip="no other engines evaluate saved checkpoints during a run; use --eval-num-gpus",
    ),
    Case(
        "openenv-sandboxes",
        tuple(f"examples/experimental/openenv/openenv_{name}_agent_function.py: run" for name in ("daytona", "e2b"))
        + ("examples/experimental/openenv/openenv_modal_agent_function.py: run",),
        skip="they need an account of a service of sandboxes; the rest of them is openenv_agent_function.py",
    ),
    Case(
        "hud",
        _of(f"{_X}hud/rollout.py", "generate", "reward_func"),
        skip="it needs hud's environments, one in a sandbox of a service for each episode",
    ),
    Case(
        "geo3k",
        _of(f"{_GEO3K}rollout.py", "generate"),
        (*GEO3K, "--rm-type", "math", "--custom-generate-function-path", f"{_GEO3K}rollout.py:generate", *EVAL),
        row=FIGURE,
        evidence=(metric("rollout/images"), metric("eval/held")),
        sees=True,
    ),
    Case(
        "geo3k-multi-turn",
        _of(f"{_GEO3K}multi_turn/rollout.py", "generate") + _of(f"{_GEO3K}multi_turn/env_geo3k.py", "build_env"),
        (*GEO3K, "--rm-type", "math", "--custom-generate-function-path", f"{_GEO3K}multi_turn/rollout.py:generate"),
        row=FIGURE,
        packages=QWEN_VL_UTILS,
        config="max_turns: 3\nrollout_interaction_env_path: examples.geo3k_vlm.multi_turn.env_geo3k\n",
        evidence=(response("calc_score result: 1.0"), response("Tool `look` is not supported")),
        sees=True,
    ),
    Case(
        "geo3k-sft",
        ("miles.rollout.sft_rollout.generate_rollout: conversations with images",),
        (
            *("--mode", "sft", "--rollout-function-path", "miles.rollout.sft_rollout.generate_rollout"),
            *("--n-samples-per-prompt", "1", "--rollout-batch-size", "8", "--multimodal-keys", '{"image": "images"}'),
        ),
        row={
            "images": ["{image}"],
            "prompt": [
                {"role": "user", "content": FIGURE["problem"]},
                {"role": "assistant", "content": "Answer: \\boxed{7}"},
            ],
            "label": "",
        },
        evidence=(_value("train/loss", "above 1", lambda loss: loss > 1), metric("train/patches")),
        sees=True,
    ),
)
