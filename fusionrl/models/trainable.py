"""What of a model is trained: low-rank adapters (LoRA) as rules, or all but the tensors frozen by name. Pure.

A Hugging Face weight W [out, in] that has an adapter computes W x + scale · B (A x), with A [rank, in] and
B [out, rank] (Hu et al. 2021, arXiv:2106.09685). Every Hugging Face tensor has its own pair, also where Megatron joins
several in one, so that the tensors are PEFT's. Their rules read, divide, gather and write them as those of weights do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from math import isclose, sqrt
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fusionrl.base.files import sampled_hash
from fusionrl.models import families
from fusionrl.models.hf_folder import is_megatron_folder, tensor_files, weights_folder
from fusionrl.models.rules import VISION, Rule, Sizes, Split
from fusionrl.models.shape import ModelShape

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."
ADAPTER = ".adapter."
"""Part of the Megatron name of every tensor of an adapter: `….linear_qkv.adapter.A.0`, the number being the place of
the Hugging Face tensor in the rule of the weight."""
IS_A = f"{ADAPTER}A."
# Megatron modules whose weights are products with the hidden states; routers, embedding and head are none.
_LINEAR = frozenset(
    {
        *("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
        *("linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"),
        *("linear_fc1", "linear_fc2", "in_proj", "out_proj"),
    }
)


class AdapterSpec(BaseModel):
    """The sizes of a run's adapters, and the modules that have one.

    alpha, use_rslora  B A x is multiplied by alpha / rank, or by alpha / √rank (Kalajdzievski 2023, arXiv:2312.03732)
    dropout            of x before A, while training
    targets, excluded  names of modules, Hugging Face's or Megatron's, or `all-linear`
    """

    model_config = ConfigDict(frozen=True)

    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    use_rslora: bool = False
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] = (ALL_LINEAR,)
    excluded: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (sqrt(self.rank) if self.use_rslora else self.rank)

    def targeted(self, rule: Rule) -> tuple[str, ...]:
        """Return the Hugging Face tensors of `rule` that have an adapter."""
        if not _may_have_adapter(rule):
            return ()
        takes_all = ALL_LINEAR in self.targets
        return tuple(
            name
            for name in rule.hf
            if (takes_all or _is_named(self.targets, rule, name)) and not _is_named(self.excluded, rule, name)
        )


def has_stacks(shape: ModelShape) -> bool:
    """Return whether tensors have the weights of all experts of a layer (gpt-oss): they get no adapters."""
    return any(rule.stack for rule in families.model_rules(shape).values())


@lru_cache(maxsize=8)
def checked_spec(spec: AdapterSpec, shape: ModelShape) -> AdapterSpec:
    """Return `spec`.

    Raises:
        ValueError: a name of a module that no linear layer of the model has, or no module is left.
    """
    rules = [rule for rule in families.model_rules(shape).values() if not rule.expert and _may_have_adapter(rule)]
    for flag, names in (("--target-modules", spec.targets), ("--exclude-modules", spec.excluded)):
        for name in names:
            if name != ALL_LINEAR and not any(_is_named((name,), rule, hf) for rule in rules for hf in rule.hf):
                leaves = sorted({hf.removesuffix(".weight").rpartition(".")[2] for rule in rules for hf in rule.hf})
                stacks = "; its experts get no adapters" if has_stacks(shape) else ""
                raise ValueError(
                    f"{flag} {name}: no linear layer of a {shape.model_type} model has this name{stacks}; known are"
                    f" {', '.join(leaves)}, and Megatron's {', '.join(sorted({_leaf(rule) for rule in rules}))}"
                )
    if not any(spec.targeted(rule) for rule in rules):
        raise ValueError("--target-modules and --exclude-modules leave no module with an adapter")
    return spec


@lru_cache(maxsize=4)
def adapter_rules(shape: ModelShape, spec: AdapterSpec) -> dict[str, Rule]:
    """Megatron name → rule of every tensor of the adapters, in the order of the model's rules. Not to be changed."""
    rules = [new for rule in families.model_rules(shape).values() for new in _rules(rule, spec)]
    return {rule.megatron: rule for rule in rules}


@lru_cache(maxsize=4)
def sample_rules(shape: ModelShape, spec: AdapterSpec) -> tuple[tuple[Rule, ...], ...]:
    """Return the rules of the adapters of each decoder layer; of its experts, which are alike, of the first alone."""
    layers: list[list[Rule]] = [[] for _ in range(shape.num_layers)]
    for rule in families.model_rules(shape).values():
        if rule.layer is not None and not rule.expert:
            layers[rule.layer] += _rules(rule, spec)
    return tuple(map(tuple, layers))


def targeted_names(shape: ModelShape, spec: AdapterSpec) -> frozenset[str]:
    """Return the Hugging Face names of the weights that have an adapter."""
    return frozenset(name for rule in families.model_rules(shape).values() for name in spec.targeted(rule))


def peft_sizes(shape: ModelShape, spec: AdapterSpec) -> dict[str, Sizes]:
    """PEFT's name → sizes of every tensor of the adapters."""
    return {name: sizes for rule in adapter_rules(shape, spec).values() for name, sizes in rule.hf.items()}


def num_adapter_parameters(shape: ModelShape, spec: AdapterSpec) -> int:
    """Return the number of values that are trained in the whole model."""
    rules = (rule for layer in sample_rules(shape, spec) for rule in layer)
    return sum(rule.numel * (1 if rule.expert is None else shape.num_experts) for rule in rules)


def peft_module(name: str) -> str:
    """Return PEFT's name of the module with the Hugging Face weight `name`."""
    return PEFT_PREFIX + name.removesuffix(".weight")


def _rules(rule: Rule, spec: AdapterSpec) -> Iterator[Rule]:
    """Yield the rules of the adapters of one weight: what is divided of W's rows is divided of B, of its columns of A.

    B of a tensor whose rows are in groups keeps them in the order of the groups, as the joined weight has them.
    """
    targeted, to = spec.targeted(rule), rule.megatron.removesuffix(".weight") + ADAPTER
    for place, (name, sizes) in enumerate(rule.hf.items()):
        if name not in targeted:
            continue
        rows, columns = sizes
        a, b = f"{peft_module(name)}.lora_A.weight", f"{peft_module(name)}.lora_B.weight"
        split: Split = "columns" if rule.split == "columns" else "replicated"
        yield Rule(f"{to}A.{place}", {a: (spec.rank, columns)}, split=split, expert=rule.expert)
        of_b = {b: (rows, spec.rank)}
        if rule.join == "grouped":
            sections = {b: rule.sections[name]} if name in rule.sections else {}
            yield Rule(f"{to}B.{place}", of_b, "grouped", rule.split, groups=rule.groups, sections=sections)
        elif rule.split == "columns":
            yield Rule(f"{to}B.{place}", of_b, expert=rule.expert)
        else:
            split = "rows" if rule.split == "paired_rows" and rule.join == "concat" else rule.split
            yield Rule(f"{to}B.{place}", of_b, split=split, expert=rule.expert)


def _may_have_adapter(rule: Rule) -> bool:
    is_weight = rule.layer is not None and rule.megatron.endswith(".weight") and len(rule.sizes) == 2
    return is_weight and not rule.stack and _leaf(rule) in _LINEAR


def _leaf(rule: Rule) -> str:
    """Return the name of the Megatron module of a weight."""
    return rule.megatron.removesuffix(".weight").rpartition(".")[2]


def _is_named(names: Sequence[str], rule: Rule, hf: str) -> bool:
    """Return whether one of `names` is the end of the module's Hugging Face name, or Megatron's name of it."""
    dotted = f".{hf}".removesuffix(".weight")
    return any(dotted.endswith(f".{name}") or name == _leaf(rule) for name in names)


class Adapted(BaseModel):
    """What a checkpoint has in place of weights.

    adapters  sizes and modules
    base      folder of the weights that they are added to
    identity  a hash of the base's weights (`sampled_hash`); None: not all of its files are on this node
    """

    model_config = ConfigDict(frozen=True)

    adapters: AdapterSpec
    base: str
    identity: str | None = None


def saved_in(description: Mapping[str, object]) -> Adapted | None:
    """Return the adapters that a checkpoint's fusionrl.json names; None: it has weights. ValueError: malformed."""
    adapted = description.get("adapted")
    return None if adapted is None else Adapted.model_validate(adapted)


def spec_difference(stored: AdapterSpec, run: AdapterSpec, shape: ModelShape) -> str | None:
    """Return how stored adapters differ from those of the flags, with the flags that would fit; None: they do not."""
    if stored.rank != run.rank:
        return f"have rank {stored.rank}; give --lora-rank {stored.rank}, not {run.rank}"
    if not isclose(stored.scale, run.scale):
        flag = " --lora-use-rslora" if stored.use_rslora else " without --lora-use-rslora" if run.use_rslora else ""
        return f"have another scale; give --lora-alpha {stored.alpha:g}{flag}"
    if adapter_rules(shape, stored).keys() != adapter_rules(shape, run).keys():
        excluded = f" --exclude-modules {' '.join(stored.excluded)}" if stored.excluded else ""
        return f"belong to other modules; give --target-modules {' '.join(stored.targets)}{excluded}"
    return None


def adapted_difference(path: object, saved: Adapted | None, run: Adapted | None, shape: ModelShape) -> str | None:
    """Return why the checkpoint at `path` with `saved` is not one of `run`; None: it is."""
    where = f"checkpoint {path}"
    if saved is None:
        cure = "leave out --lora-rank to resume, or start another run with --megatron-checkpoint of this folder"
        return None if run is None else f"{where}: it has weights and no adapters; {cure}"
    if run is None:
        rank = saved.adapters.rank
        return f"{where}: it has adapters and no weights; give --lora-rank {rank} to resume, or merge (fusionrl export)"
    if difference := spec_difference(saved.adapters, run.adapters, shape):
        return f"{where}: its adapters {difference}"
    if None in (saved.identity, run.identity) or saved.identity == run.identity:
        return None
    return (
        f"{where}: its adapters belong to the weights in {saved.base}, and those in {run.base} are others; resume with"
        " the former"
    )


@lru_cache(maxsize=4)
def base_identity(folder: str) -> str | None:
    """Return a hash of the weights in `folder`, Hugging Face's or Megatron's; None: some are not on this node."""
    if is_megatron_folder(folder):
        files = sorted(Path(weights_folder(folder)).glob("*.distcp"))
    else:
        files = sorted(set(tensor_files(folder).values()))
    try:
        return sampled_hash(files)
    except FileNotFoundError:
        return None


FREEZE, ONLY, TOWER = "--freeze-params-name-list", "--only-train-params-name-list", "--freeze-vision"


@lru_cache(maxsize=8)
def frozen_tensors(
    shape: ModelShape, freeze: tuple[str, ...], only: tuple[str, ...], freezes_vision: bool
) -> frozenset[str]:
    """Return the Megatron names of the parameters that are not trained.

    A pattern is searched for in a tensor's Megatron name and in its Hugging Face names.

    freeze, only    patterns of those that are not trained, or of those that alone are
    freezes_vision  no tensor of the vision tower is

    Raises:
        ValueError: both lists, a pattern that is malformed or finds no parameter, or no parameter is left.
    """
    if freeze and only:
        raise ValueError(f"{FREEZE} and {ONLY} exclude each other; give one of them")
    names = {
        rule.megatron: (rule.megatron, *rule.hf) for rule in families.model_rules(shape).values() if not rule.buffer
    }
    frozen = {name for name in names if freezes_vision and name.startswith(VISION)}
    frozen |= _found(names, freeze, FREEZE)
    frozen |= names.keys() - _found(names, only, ONLY) if only else set()
    if len(frozen) == len(names):
        given = [flag for flag, is_given in ((FREEZE, freeze), (ONLY, only), (TOWER, freezes_vision)) if is_given]
        raise ValueError(f"{' and '.join(given)}: no parameter is left to train")
    return frozenset(frozen)


def frozen_names(shape: ModelShape, frozen: Set[str]) -> frozenset[str]:
    """Return the Hugging Face names of the tensors of which no part is trained."""
    rules = families.model_rules(shape)
    trained = {hf for name, rule in rules.items() if name not in frozen for hf in rule.hf}
    return frozenset(hf for name in frozen for hf in rules[name].hf) - trained


def _found(names: dict[str, tuple[str, ...]], patterns: Sequence[str], flag: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise ValueError(f"{flag} {pattern}: no regular expression ({error})") from error
        matches = {name for name, spellings in names.items() if any(search(one) for one in spellings)}
        if not matches:
            raise ValueError(f"{flag} {pattern}: no parameter has such a name; one of them is {next(iter(names))}")
        found |= matches
    return found
