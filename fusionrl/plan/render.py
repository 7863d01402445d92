"""The plan as text, as `fusionrl plan` and a run's plan.txt show it."""

from collections.abc import Mapping, Sequence

from fusionrl.base.cpu_wing import ATTENTION_BACKEND
from fusionrl.base.process import most_open_files
from fusionrl.base.wording import counted
from fusionrl.config.algorithm import with_preset
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import EngineGroup
from fusionrl.config.parser import spell
from fusionrl.config.pipeline import correction_text, describe_knobs
from fusionrl.config.run_parts import changes_weights, uses_engines
from fusionrl.models.families import model_rules
from fusionrl.models.trainable import num_adapter_parameters
from fusionrl.plan.costs import ImageCost, SequenceCost
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.memory.bars import gib
from fusionrl.plan.memory.report import training_bytes
from fusionrl.plan.plan import Plan
from fusionrl.plan.push_plan import planned_push
from fusionrl.plan.trained_parts import adapter_folders, adapter_push, adapters_of, target_modules, trains_tower
from fusionrl.plan.trainer_plan import WIDTHS, warm_up_notes

_TURNS = {
    "engines first": "engines start alone, then trainers; in a push and its check each side holds its weights alone;"
    " engines generate alone; trainers train alone",
    "trainers first": "trainers start alone, then engines in what is left; engines keep their memory",
}


def render_plan(plan: Plan, config: Config, warnings: Sequence[str] = ()) -> str:
    """The plan as text: what runs where, and with what arithmetic; and the `warnings` that checks had."""
    shape = plan.shape
    is_known = config.run.num_rollout is not None or plan.num_rollout or config.run.mode == "eval"
    steps = counted(plan.num_rollout, "rollout step") if is_known else "number of rollout steps not given"
    lines = [
        f"mode       {config.run.mode}, pipeline {config.run.pipeline}, {steps}",
        f"model      {shape.model_type}, {shape.num_parameters / 1e6:.2f} M parameters, "
        f"{counted(shape.num_layers, 'layer')} x {shape.hidden_size}, {counted(shape.num_attention_heads, 'head')}, "
        f"vocabulary {shape.vocab_size}",
        f"device     {plan.device}, trainers {plan.precision}, engines {plan.rollout_dtype}, "
        f"collectives {plan.backend}",
        f"placement  {counted(plan.num_bundles, 'device')}, "
        f"{'colocated' if plan.is_colocated else 'apart'}{_idle(plan)}",
    ]
    if (vision := shape.vision) is not None:
        count = sum(rule.numel for rule in model_rules(shape).values() if rule.is_vision)
        work = 3 * ImageCost.of_shape(vision, is_trained=False).linear / SequenceCost.of_shape(shape).linear
        lines.append(
            f"vision     tower of {count / 1e6:.2f} M parameters, {counted(vision.num_layers, 'block')} x"
            f" {vision.hidden_size}, {'trained' if trains_tower(config, shape) else 'not trained'}; a token is"
            f" {vision.unit} x {vision.unit} pixels, for which the tower does {work:.2f} of a text token's work"
        )
    lines += _adapters(plan, config)
    if plan.start_order != "together":
        lines.append(f"turns      {_TURNS[plan.start_order]}")
    if plan.knobs:
        lines.append(f"pipeline   {describe_knobs(plan.knobs)}")
    if (loss := correction_text(config)) is not None:
        lines.append(f"loss       {loss}")
    if config.algorithm.algorithm is not None:
        lines.append(f"algorithm  {config.algorithm.algorithm}: {', '.join(preset_flags(vars(config.to_args())))}")
    if plan.layout:
        lines.append(f"trainers   {_ranks(plan.layout, plan.trainer_bundles)}")
    if plan.auxiliary:
        lines.append(f"{plan.auxiliary.role:<11}{_ranks(plan.auxiliary.layout, plan.auxiliary.bundles)}")
    if plan.num_engines:
        named = [f"engine {i} on {_devices(bundles)}" for i, bundles in enumerate(plan.engine_bundles)]
        # On a GPU SGLang chooses, unless the user does.
        on_cpu = ATTENTION_BACKEND if plan.device == "cpu" else None
        backend = config.passthrough.sglang.get("attention_backend") or on_cpu
        attention = f"; attention {backend}" if backend else ""
        in_place = config.weights.pause_generation_mode == "in_place"
        cache = "; no prefix cache, for --pause-generation-mode in_place" if in_place else ""
        sizes = f"{plan.num_engines} x TP {plan.engine_size}" if not plan.groups else f"{plan.num_engines} in groups"
        lines.append(f"engines    {sizes}: {_some(named)}{cache}{attention}")
        lines += [f"           {_group(group)}" for group in plan.groups]
    if plan.eval_bundles:
        first = plan.num_engines
        named = [f"engine {first + i} on {_devices(bundles)}" for i, bundles in enumerate(plan.eval_bundles)]
        size = len(plan.eval_bundles[0])
        lines.append(f"evaluation {len(named)} x TP {size}, while training continues: {_some(named)}")
    for scorer in plan.scorers:
        name = "rm" if scorer.role == "reward-model" else scorer.role
        lines.append(
            f"{name:<11}{len(scorer.bundles)} x TP {scorer.size} of {scorer.model_path}:"
            f" {', '.join(str(list(bundles)) for bundles in scorer.bundles)}"
        )
    if plan.transport:
        lines += _push(plan, config)
    if plan.batch:
        lines.append(f"batches    {plan.batch.describe()}")
    if plan.memory:
        lines += [f"{'memory' if not i else '':<11}{line}" for i, line in enumerate(plan.memory.lines())]
        lines.append(f"verdict    {plan.memory.verdict()} (an estimate: docs/guides/check.md)")
    lines += [f"schedule   {text}" for text in warm_up_notes(config, plan.num_optimizer_steps)]
    if plan.sandbox is not None:
        lines.append(f"sandbox    {plan.sandbox}")
    lines += [f"warning    {text}" for text in warnings]
    return "\n".join(lines) + "\n"


def _adapters(plan: Plan, config: Config) -> list[str]:
    """Lines about adapters: what is trained, what that saves of full training, what is pushed and why."""
    spec = adapters_of(config, plan.shape)
    if spec is None or (plan.layout is None and plan.lora_push is None):
        return []
    head = f"adapters   rank {spec.rank} on {', '.join(sorted(target_modules(plan.shape, spec)))}:"
    if not changes_weights(config):
        folders = ", ".join(f"{name} of {folder}" for name, folder in adapter_folders(config).items())
        return [f"{head} engines get {folders}{' added to the weights' * (plan.lora_push == 'merged')}"]
    count, names = num_adapter_parameters(plan.shape, spec), list(adapter_folders(config))
    others = f" for each of {', '.join(names)}" if len(names) > 1 else ""
    own, full = training_bytes(plan, config, spec), training_bytes(plan, config, None)
    lines = [
        f"{head} {count / 1e6:.2f} M parameters are trained{others}, {count / plan.shape.num_parameters:.2%} of the"
        " model's",
        f"           a rank has {gib(own.optimizer)} GiB of optimizer, {own.optimizer / full.optimizer:.2%} of full"
        f" training's {gib(full.optimizer)}, and {gib(full.gradients - own.gradients)} GiB of gradients less",
    ]
    if (push := adapter_push(config, plan.shape)) is not None:
        size = plan.push_bytes if push[0] == "merged" else len(names) * count * WIDTHS[plan.rollout_dtype]
        what = "weights with the adapter added" if push[0] == "merged" else f"adapters{others}"
        lines.append(f"           {what} are pushed, {size / 1e6:.1f} MB a version: {push[1]}")
    return lines


def memory_warnings(plan: Plan) -> list[str]:
    """Return loud warnings about memory; the run starts nevertheless, as an estimate may be wrong."""
    if plan.memory is None or plan.memory.fits is not False:
        return []
    return [f"memory, by estimate: {plan.memory.verdict()}"]


def _push(plan: Plan, config: Config) -> list[str]:
    """Lines about the weight push, with its buckets where it is planned."""
    fp8 = "" if plan.quantization is None else f", {len(plan.quantization.names)} tensors of them in block-wise fp8"
    line = f"weights    {plan.push_bytes / 1e6:.1f} MB by {plan.transport}{fp8}"
    push = planned_push(plan, config)
    if push is None:
        return [line]
    headline, who = push.describe()
    return [f"{line}: {headline}", f"           {who}"]


def _group(group: EngineGroup) -> str:
    """One group of --engine-group: its size, its role, and what its engines have that others have not."""
    text = f"{group.name}: {group.num_engines} x TP {group.per_engine}, {group.role}"
    fields = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in group.server_args.items()
    ]
    return f"{text}, {' '.join(fields)}" if fields else text


def _ranks(layout: TrainerLayout, bundles: tuple[int, ...]) -> str:
    sizes = f"TP {layout.tp} x CP {layout.cp} x PP {layout.pp} x DP {layout.dp} (EP {layout.ep})"
    return f"{counted(layout.world_size, 'rank')} = {sizes} on devices {_devices(bundles)}"


def _some(named: list[str]) -> str:
    """The engines as a list, or some of many."""
    return ", ".join(named if len(named) <= 8 else [*named[:3], "…", named[-1]])


def _devices(bundles: tuple[int, ...]) -> str:
    """Devices as a list, or as first and last where many follow one another."""
    follow = bundles == tuple(range(bundles[0], bundles[0] + len(bundles)))
    return f"[{bundles[0]} … {bundles[-1]}]" if follow and len(bundles) > 8 else str(list(bundles))


def _idle(plan: Plan) -> str:
    """The devices that nothing runs on, so that no engine spans two nodes."""
    used = {*plan.trainer_bundles}.union(
        *plan.all_engine_bundles, *(b for scorer in plan.scorers for b in scorer.bundles)
    )
    used |= set(plan.auxiliary.bundles) if plan.auxiliary else set()
    idle = [bundle for bundle in range(plan.num_bundles) if bundle not in used]
    return f", idle {idle} so that no engine spans more nodes than it needs" if idle else ""


def preset_flags(values: Mapping[str, object]) -> list[str]:
    """The flags of the preset that `values` (all flags) name, as they stand; those that were given otherwise say so."""
    chosen = {name: values[name] for name in ("algorithm", "rollout_max_response_len")}
    return [
        spell(field, values[field]) + ("" if values[field] == value else f" (given; the preset has {value})")
        for field, value in with_preset(chosen).items()
        if field not in chosen
    ]


FILES_BESIDE = 200
"""Files of the router without its connections for requests: libraries, logs, health checks."""


def most_requests(open_files: int) -> int:
    """Return how many requests may be under way: each is a connection from the client and one to an engine."""
    return max(0, (open_files - FILES_BESIDE) // 2)


def samples_in_flight(config: Config, plan: Plan) -> int:
    """Return how many samples may be under way at once, by flags and bound."""
    knobs, rollout = plan.knobs, config.rollout
    if knobs is not None:
        groups = int((1 + knobs.admission_lead) * knobs.groups_per_version) + knobs.spare_groups
        return min(knobs.max_samples_in_flight, groups * knobs.samples_per_group)
    groups = max(rollout.rollout_batch_size or 0, rollout.over_sampling_batch_size or 0)
    return min(rollout.sglang_server_concurrency * plan.num_engines, groups * rollout.n_samples_per_prompt)


def open_file_warnings(config: Config, plan: Plan) -> list[str]:
    """A text where more samples may be under way than the router has open files for."""
    if not uses_engines(config) or not plan.num_engines:
        return []
    limit, samples = most_open_files(), samples_in_flight(config, plan)
    if samples <= most_requests(limit):
        return []
    most = most_requests(limit)
    return [
        f"{samples} samples may be in flight, and each takes two open files of the router; this machine allows it"
        f" {limit}, enough for {most}: raise the hard limit (ulimit -Hn) to {2 * samples + FILES_BESIDE}, or give"
        f" --sglang-server-concurrency {max(1, most // plan.num_engines)}"
    ]
