"""The user-level functions of slime's examples and plug-ins, and how each is run: flags, data, servers, evidence."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from from_slime_stubs import (
    IFBENCH,
    QWEN_VL_UTILS,
    STRANDS,
    TAU_BENCH,
    WANDB,
    StubServer,
    search_answer,
    teacher_answer,
)

RETRIEVER_PORT = 8000  # which the example names in its file
BUFFER_PORT = 8889  # which the plug-in's server takes


@dataclass
class Site:
    """Where a case runs: the checkout, a folder of its own, and what was counted by its servers."""

    slime: Path
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    counts: dict[str, Callable[[], int]] = field(default_factory=dict)


@dataclass
class Outcome:
    """The results of a run: rows of metrics, and the samples of its rollouts."""

    metrics: list[dict]
    samples: list[dict]
    counts: dict[str, int]

    def text(self) -> str:
        """The responses of all samples."""
        return "\n".join(sample["response"] or "" for sample in self.samples)

    def has_metric(self, part: str) -> bool:
        """Return whether a metric's name holds this text."""
        return any(part in name for row in self.metrics for name in row)


Server = Callable[[Site], "contextlib.AbstractContextManager[list[str]]"]


@dataclass(frozen=True)
class Case:
    """Functions that one run covers.

    functions  as `file: function`
    flags      those of the example's launch script that matter, with {slime} for the checkout
    row        one row of prompts, or None for the usual ones; {number} and {image} are others in each
    sees       the model sees
    packages   stand-ins for packages that are not installed
    server     what the example talks to; gives further flags
    evidence   what shows that the functions did their work, as (words, check)
    exact      the engines' log-probs are those of the trainers
    skip       why it is not run
    """

    name: str
    functions: tuple[str, ...]
    flags: tuple[str, ...] = ()
    row: dict | None = None
    num_rows: int = 8
    packages: dict[str, str] = field(default_factory=dict)
    server: Server | None = None
    evidence: tuple[tuple[str, Callable[[Outcome], bool]], ...] = ()
    exact: bool = True
    config: str = ""
    skip: str = ""
    sees: bool = False


@contextlib.contextmanager
def retriever(site: Site) -> Iterator[list[str]]:
    server = StubServer("/retrieve", search_answer, RETRIEVER_PORT)
    site.counts["searches"] = lambda: server.num_requests
    try:
        yield []
    finally:
        server.close()


@contextlib.contextmanager
def teacher(site: Site) -> Iterator[list[str]]:
    server = StubServer("/generate", teacher_answer)
    site.counts["scored"] = lambda: server.num_requests
    try:
        yield ["--rm-url", server.url]
    finally:
        server.close()


@contextlib.contextmanager
def _buffer_server(site: Site) -> Iterator[list[str]]:
    """Run the plug-in's own server, unchanged: `python buffer.py`, but with slime's names."""
    folder = site.slime / "slime_plugins" / "rollout_buffer"
    log = site.folder / "buffer.log"
    process = subprocess.Popen(
        [sys.executable, "-m", "fusionrl.compat.slime", str(folder / "buffer.py")],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, **site.env, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    site.counts["written"] = lambda: log.read_text(errors="replace").count("POST /buffer/write")
    try:
        yield ["--rollout-buffer-url", f"http://127.0.0.1:{BUFFER_PORT}"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


@contextlib.contextmanager
def _evaluation_sets(site: Site) -> Iterator[list[str]]:
    """Write the sets that the example's file names, and the file with their places here."""
    graded = {"choices": ["six", "seven"], "correct_letter": "B"}
    followed = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    config = (site.slime / "examples/eval_multi_task/multi_task.yaml").read_text(encoding="utf-8")
    for name, metadata in (("aime", {}), ("gpqa", graded), ("ifbench", followed)):
        path = site.folder / f"{name}.jsonl"
        row = {"prompt": "What is 3 + 4?", "label": "B" if name == "gpqa" else "7", "metadata": metadata}
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        config, changed = re.subn(rf"(name: {name}\b.*\n\s+path: ).*", rf"\g<1>{path}", config)
        assert changed == 1, f"multi_task.yaml has no set {name}"
    (site.folder / "multi_task.yaml").write_text(config, encoding="utf-8")
    yield ["--eval-config", str(site.folder / "multi_task.yaml"), "--eval-interval", "1"]


def counted(name: str, least: int = 1) -> tuple[str, Callable[[Outcome], bool]]:
    return f"{name} >= {least}", lambda outcome: outcome.counts[name] >= least


def metric(part: str) -> tuple[str, Callable[[Outcome], bool]]:
    return f"metric {part}", lambda outcome: outcome.has_metric(part)


def response(part: str) -> tuple[str, Callable[[Outcome], bool]]:
    return f"{part} in a response", lambda outcome: part in outcome.text()


def more_samples(least: int) -> tuple[str, Callable[[Outcome], bool]]:
    return f"at least {least} samples", lambda outcome: len(outcome.samples) >= least


EVAL = ("--eval-interval", "1", "--eval-prompt-data", "held", "{data}", "--n-samples-per-eval-prompt", "1")
_AGENT_FILES = "{slime}/examples/multi_agent/"
_SEARCH = "{slime}/examples/search-r1/generate_with_search.py"
_RETOOL = "{slime}/examples/retool/generate_with_retool.py"
_STRANDS = "{slime}/examples/strands_sglang/generate_with_strands.py"
_TAU = "{slime}/examples/tau-bench/generate_with_tau.py"
_MIS = "{slime}/examples/train_infer_mismatch_helper/"
_BUFFER = "{slime}/slime_plugins/rollout_buffer/rollout_buffer_example.py"
_GEO3K = "{slime}/examples/geo3k_vlm_multi_turn/"
GEO3K = ("--input-key", "problem", "--label-key", "answer", "--multimodal-keys", '{"image": "images"}')
GEO3K += ("--apply-chat-template",)
FIGURE = {"images": ["{image}"], "problem": "<image>What is 3 + 4?", "answer": "7"}
_OPD = "slime.rollout.on_policy_distillation"

CASES: Sequence[Case] = (
    Case(
        "search-r1",
        (
            "examples/search-r1/generate_with_search.py: generate",
            "examples/search-r1/generate_with_search.py: reward_func",
        ),
        ("--custom-generate-function-path", f"{_SEARCH}:generate", "--custom-rm-path", f"{_SEARCH}:reward_func", *EVAL),
        row={"prompt": "Who was it?", "label": {"ground_truth": {"target": ["7"]}}},
        server=retriever,
        evidence=(counted("searches"), response("<information>")),
    ),
    Case(
        "retool",
        ("examples/retool/generate_with_retool.py: generate", "examples/retool/generate_with_retool.py: reward_func"),
        (
            *("--custom-generate-function-path", f"{_RETOOL}:generate", "--custom-rm-path", f"{_RETOOL}:reward_func"),
            *("--reward-key", "score"),
        ),
        evidence=(response("<interpreter>"),),
    ),
    Case(
        "multi-agent",
        (
            "examples/multi_agent/rollout_with_multi_agents.py: generate_with_multi_agents",
            "examples/multi_agent/agent_system.py: run_agent_system",
        ),
        (
            *(
                "--custom-generate-function-path",
                f"{_AGENT_FILES}rollout_with_multi_agents.py:generate_with_multi_agents",
            ),
            *("--rm-type", "math", *EVAL),
        ),
        num_rows=4,
        evidence=(more_samples(2 * 16 * 6),),
    ),
    Case(
        "tau-bench",
        ("examples/tau-bench/generate_with_tau.py: generate",),
        (
            *("--custom-generate-function-path", f"{_TAU}:generate", "--dynamic-sampling-filter-path"),
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        ),
        row={"prompt": "{number}", "label": ""},
        packages=TAU_BENCH,
        evidence=(more_samples(32),),
        exact=False,  # it makes tokens of the engines' text
    ),
    Case(
        "strands",
        (
            "examples/strands_sglang/generate_with_strands.py: generate",
            "examples/strands_sglang/generate_with_strands.py: reward_func",
        ),
        (
            *("--custom-generate-function-path", f"{_STRANDS}:generate", "--custom-rm-path", f"{_STRANDS}:reward_func"),
            *("--router-api-key", "none"),
        ),
        packages=STRANDS,
        evidence=(more_samples(32),),
    ),
    Case(
        "mis",
        ("examples/train_infer_mismatch_helper/mis.py: compute_mis_weights_with_cp",),
        (
            *("--custom-config-path", f"{_MIS}mis.yaml", "--use-tis", "--rm-type", "math"),
            *("--custom-tis-function-path", f"{_MIS}mis.py:compute_mis_weights_with_cp"),
            *("--actor-num-gpus-per-node", "2", "--context-parallel-size", "2"),
        ),
        evidence=(metric("mis_is_ratio_mean_final"),),
    ),
    Case(
        "rollout-buffer",
        (
            "slime_plugins/rollout_buffer/rollout_buffer_example.py: generate_rollout",
            "slime_plugins/rollout_buffer/buffer.py: the server",
            "slime_plugins/rollout_buffer/generator/base_generator.py: run_rollout",
        ),
        (
            *("--rollout-function-path", f"{_BUFFER}:generate_rollout", "--rm-type", "math"),
            *("--router-api-key", "none", "--disable-rewards-normalization", "--loss-mask-type", "qwen"),
        ),
        row={"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "label": "7"},
        num_rows=300,
        packages=WANDB,
        config="rollout_num_process: 2\n",
        server=_buffer_server,
        evidence=(counted("written", 8),),
        exact=False,  # the server makes tokens of messages
    ),
    Case(
        "fully-async",
        ("examples/fully_async: slime.rollout.fully_async_rollout.generate_rollout_fully_async",),
        (
            *("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
            *("--rm-type", "math"),
        ),
        evidence=(more_samples(32),),
    ),
    Case(
        "on-policy-distillation",
        (
            f"examples/on_policy_distillation: {_OPD}.reward_func",
            f"examples/on_policy_distillation: {_OPD}.post_process_rewards",
        ),
        (
            *("--custom-rm-path", f"{_OPD}.reward_func", "--use-opd", "--opd-type", "sglang", "--opd-kl-coef", "1.0"),
            *("--custom-reward-post-process-path", f"{_OPD}.post_process_rewards"),
        ),
        server=teacher,
        evidence=(counted("scored", 8), metric("opd")),
    ),
    Case(
        "eval-multi-task",
        ("examples/eval_multi_task/multi_task.yaml: its sets, at other places",),
        ("--rm-type", "math"),
        packages=IFBENCH,
        server=_evaluation_sets,
        evidence=(metric("eval/aime/"), metric("eval/gpqa/"), metric("eval/ifbench/")),
    ),
    Case(
        "coding-agent",
        ("examples/coding_agent_rl/generate.py: generate",),
        skip="it needs the sandboxes of E2B and slime.agent's harnesses for command-line agents, which are not here;"
        " agents are trained through the session proxy (docs/guides/agents.md)",
    ),
    Case(
        "geo3k",
        ("examples/geo3k_vlm/run_geo3k_qwen35.sh: its data and its reward",),
        (*GEO3K, "--rm-type", "deepscaler", *EVAL),
        row=FIGURE,
        evidence=(metric("rollout/images"), metric("eval/held")),
        sees=True,
    ),
    Case(
        "geo3k-multi-turn",
        ("examples/geo3k_vlm_multi_turn/rollout.py: generate", "examples/geo3k_vlm_multi_turn/env_geo3k.py: build_env"),
        (*GEO3K, "--rm-type", "math", "--custom-generate-function-path", f"{_GEO3K}rollout.py:generate"),
        row=FIGURE,
        packages=QWEN_VL_UTILS,
        config="max_turns: 3\nrollout_interaction_env_path: examples.geo3k_vlm_multi_turn.env_geo3k\n",
        evidence=(response("calc_score result: 1.0"), response("Tool `look` is not supported")),
        sees=True,
    ),
)
