"""The border between the Buffer and a user's functions: the flat `args` that they get, as slime's users know it."""

from __future__ import annotations

import argparse
import copy
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.config.hooks import call_hook, flag_of
from fusionrl.engines.http import ROUTER_URLS
from fusionrl.plan.plan import Plan
from fusionrl.rollout.teacher import Teacher


@dataclass(frozen=True)
class EngineEndpoints:
    """Addresses of the engines; empty in a mode without engines, `eval_…` without --eval-num-gpus."""

    router_url: str = ""
    engine_urls: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    rm_urls: tuple[str, ...] = ()
    teacher_urls: tuple[str, ...] = ()
    eval_router_url: str = ""
    eval_urls: tuple[str, ...] = ()

    def for_evaluation(self) -> EngineEndpoints:
        """Return the same with the engines that evaluate in place of those that generate, where these are others."""
        if not self.eval_urls:
            return self
        return replace(self, router_url=self.eval_router_url, engine_urls=self.eval_urls)

    def export(self) -> None:
        """Put the key, and the addresses that get it, into this process's environment: for requests of hooks."""
        if self.api_key is not None:
            os.environ[ROUTER_KEY] = self.api_key
            urls = [self.router_url, *self.engine_urls, *self.rm_urls, *self.teacher_urls]
            urls += [self.eval_router_url, *self.eval_urls]
            os.environ[ROUTER_URLS] = " ".join(urls)


@dataclass(frozen=True)
class Hook:
    """A user's function of one flag. What it raises names the flag and the function."""

    field: str
    path: str

    @property
    def where(self) -> str:
        """Flag and function, as messages begin."""
        return f"{flag_of(self.field)} {self.path}"

    def __call__(self, *arguments: object) -> object:
        """Call the function; HookError for whatever it raises."""
        return call_hook(self.field, self.path, *arguments)


class HookBorder:
    """Makes the `args` of hooks; nothing else in the Buffer reads flags from a flat namespace.

    It is built at most once a rollout, when the first hook is called. Each hook gets a copy of its own, so that what
    one writes on it reaches no other.
    """

    def __init__(self, config: Config, plan: Plan, run_dir: Path, abort: threading.Event) -> None:
        self._config, self._plan, self._run_dir, self._abort = config, plan, run_dir, abort
        self._endpoints = EngineEndpoints()
        self._built: tuple[EngineEndpoints, argparse.Namespace] | None = None

    def set_endpoints(self, endpoints: EngineEndpoints) -> None:
        self._endpoints, self._built = endpoints, None

    def begin(self) -> None:
        """Begin a rollout or an evaluation: `args` are built anew."""
        self._built = None

    def hook(self, field: str) -> Hook | None:
        """Return the function of the flag of `field`; None where the user gives none."""
        flags = {**vars(self._config.rollout), **vars(self._config.reward)}
        return Hook(field, flags[field]) if flags[field] is not None else None

    def args(self) -> argparse.Namespace:
        """Return a copy of the flags for one call of a hook, with slime's names for what the run adds."""
        # A rollout's thread asks while the event loop may call `begin` or `set_endpoints`: `_built` is read once.
        built, ends = self._built, self._endpoints
        if built is None or built[0] is not ends:
            built = self._built = (ends, self._build(ends))
        return copy.deepcopy(built[1])

    def eval_args(self) -> argparse.Namespace:
        """Return the same for an evaluation, which may have engines of its own."""
        ends = self._endpoints.for_evaluation()
        return self.args() if ends is self._endpoints else self._build(ends)

    def teacher(self) -> Teacher:
        """Return the teacher, whose clients belong to the event loop that uses it."""
        ends = self._endpoints
        return Teacher(ends.teacher_urls, ends.api_key, self._plan.shape.vocab_size)

    def policy_urls(self) -> list[str]:
        """Return the addresses of the policy's engines and of their router."""
        ends = self._endpoints
        return [url for url in (ends.router_url, *ends.engine_urls) if url]

    def _build(self, ends: EngineEndpoints) -> argparse.Namespace:
        shape = self._plan.shape
        host, _, port = ends.router_url.removeprefix("http://").rpartition(":")
        asks_for_experts = self._config.algorithm.use_rollout_routing_replay and self._plan.device == "cuda"
        added: dict[str, object] = dict(  # noqa: C408  # names of `args`, as a hook writes them
            sglang_router_ip=host or None,
            sglang_router_port=int(port) if port else None,
            router_url=ends.router_url,
            engine_urls=list(ends.engine_urls),
            api_key=ends.api_key,
            rm_urls=list(ends.rm_urls),
            teacher_urls=list(ends.teacher_urls),
            rollout_global_dataset=self._config.data.prompt_data is not None,
            rollout_num_engines=len(ends.engine_urls),
            vocab_size=shape.vocab_size,
            # (layers, experts of a token), where the engines are asked which experts they chose
            routed_experts_size=(shape.num_layers, shape.mixture.topk) if asks_for_experts and shape.mixture else None,
            num_experts=shape.num_experts or None,
            save=str(self._run_dir / "checkpoints"),
            load=None,
            run_dir=str(self._run_dir),
            abort_event=self._abort,
        )
        args = self._config.to_args(**self._plan.answers | added)
        args.eval_datasets = eval_sets(args)
        return args
