"""All checks of `fusionrl doctor`, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.base.imports import quiet
from fusionrl.checks.data import prompt_columns
from fusionrl.checks.doctor import machine, nodes, probes
from fusionrl.checks.doctor.findings import Finding, fact, fault, of_messages
from fusionrl.checks.outputs import disks_of_run
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.config.run_parts import generates, uses_engines
from fusionrl.data.prompts import render_prompt
from fusionrl.data.row_checks import metadata_and_tools, see
from fusionrl.data.rows import read_rows
from fusionrl.data.sample import Sample
from fusionrl.plan.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_ROWS = 3  # of the data, on which the reward is probed


@dataclass(frozen=True)
class Options:
    """Flags of the command itself."""

    deep: bool = False  # also what takes longer than seconds: imports of the whole stack, all weights
    gold: str | None = None  # the form in which the reward wants an answer, with {label} in it


@dataclass(frozen=True)
class Examined:
    """A command line as far as it could be read."""

    config: Config | None  # None: no flags of a run were given, or their file cannot be read
    plan: Plan | None  # None: no flags, or wrong ones
    errors: Sequence[str]  # messages of the checks that `fusionrl train` makes
    warnings: Sequence[str]  # likewise
    device: str  # "cpu" or "cuda"


def examine(examined: Examined, options: Options) -> list[Finding]:
    """Return the findings of all checks that the command line gives a reason for."""
    return [*machine_findings(examined, options), *flag_findings(examined), *run_findings(examined, options)]


def machine_findings(examined: Examined, options: Options) -> list[Finding]:
    """Check packages and the machine."""
    config, plan = examined.config, examined.plan
    needs_engines = config is None or uses_engines(config)
    findings = [*nodes.package_findings(needs_engines), *nodes.torch_findings(examined.device)]
    if options.deep:
        findings += nodes.import_findings()
    num_ranks = plan.layout.world_size if plan is not None and plan.layout is not None else 0
    num_processes = num_ranks + (plan.num_engines if plan is not None else 0)
    findings += machine.node_findings(plan, examined.device, num_processes)
    findings += machine.disk_findings(*disks_of_run(config, plan))
    if config is not None and config.cluster.ray_address and ":" in config.cluster.ray_address:
        findings += machine.address_findings("ray", "--ray-address", config.cluster.ray_address)
    if config is not None and config.reward.rm_url:
        findings += machine.address_findings("reward", "--rm-url", config.reward.rm_url)
    return findings


def flag_findings(examined: Examined) -> list[Finding]:
    """Report the flags, the data and the memory estimate, as `fusionrl plan` checks them."""
    config, plan = examined.config, examined.plan
    if config is None and examined.errors:
        return of_messages("flags", "fault", examined.errors)
    if config is None or (plan is None and not examined.errors):
        return [fact("flags", "no flags of a run were given: only machines were looked at")]
    findings = of_messages("flags", "fault", examined.errors) + of_messages("flags", "warning", examined.warnings)
    if not examined.errors:
        prompts = config.data.prompt_data or []
        findings.insert(0, fact("flags", f"they fit together; --prompt-data {' '.join(prompts) or 'none'}"))
    memory = plan.memory if plan is not None else None
    if memory is not None:
        verdict, _, cure = memory.verdict().partition("; ")
        if memory.fits is False:
            findings.append(fault("estimate", verdict, cure or "take more devices"))
        else:
            findings.append(fact("estimate", memory.verdict()))
    return findings


def run_findings(examined: Examined, options: Options) -> list[Finding]:
    """Probe the model's folder and the reward on a few rows of the data."""
    config, plan = examined.config, examined.plan
    folder = config.model.hf_checkpoint if config is not None else None
    if config is None or folder is None or not Path(folder).is_dir():
        return []
    findings: list[Finding] = []
    if options.deep:
        findings += probes.weight_findings(Path(folder))
    try:
        from fusionrl.data.tokenizer import load_tokenizer

        with quiet():
            tokenizer = load_tokenizer(folder)
    except (OSError, ValueError) as error:
        cure = "copy the tokenizer's files into the folder again"
        return [*findings, fault("tokens", f"--hf-checkpoint {folder}: its tokenizer cannot be read ({error})", cure)]
    if plan is None:
        return findings  # shape and data are not known to be whole
    with quiet():
        return findings + _probes(config, plan, tokenizer, options)


def _probes(config: Config, plan: Plan, tokenizer: PreTrainedTokenizerBase, options: Options) -> list[Finding]:
    uses_template = config.data.apply_chat_template or config.run.mode == "sft"
    has_template = bool(getattr(tokenizer, "chat_template", None))
    kwargs = (config.data.apply_chat_template_kwargs or {}) if uses_template and has_template else None
    findings = probes.tokenizer_findings(tokenizer, plan.shape.vocab_size) + probes.image_findings(config, tokenizer)
    findings += [] if kwargs is None else probes.template_findings(tokenizer, kwargs)
    if uses_engines(config) and not config.rollout.rollout_ignore_eos:
        findings += probes.end_findings(tokenizer, config, plan.shape.vocab_size, kwargs)
    if not generates(config) or config.run.load_debug_rollout_data is not None:
        return findings
    rows = probe_rows(config, tokenizer)
    if not rows:
        return findings
    if isinstance(rows[0].prompt, str):
        findings += probes.prompt_findings(tokenizer, rows[0].prompt)
    answers = probes.written_answers(config, rows, options.gold)
    findings += probes.label_findings(tokenizer, answers, config.rollout.rollout_max_response_len)
    args = config.to_args(**plan.answers)
    args.eval_datasets = eval_sets(args)
    return [*findings, *probes.reward_findings(config, args, rows, options.gold)]


def probe_rows(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return samples of the first rows of the prompt data, rendered as a run does; none that cannot be rendered."""
    columns, samples = prompt_columns(config), []
    for spec in (config.data.prompt_data or [])[:1]:
        for index, (_, row) in enumerate(islice(read_rows(spec), NUM_ROWS)):
            metadata, tools = metadata_and_tools(row, columns)
            try:
                prompt = render_prompt(see(row, columns).prompt, tokenizer, columns, tools).text  # type: ignore[arg-type]  # checked before
            except ValueError:
                continue  # a user's function renders it
            label = row.get(columns.label_key) if columns.label_key else None
            samples.append(Sample(index=index, prompt=prompt, label=label, metadata=metadata))
    return samples
