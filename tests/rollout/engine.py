"""An HTTP engine that says what a test wrote down, and notes what it was asked; and SGLang's own, on a CPU."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from fusionrl.data.sample import Sample
from fusionrl.engines.client import GenerateClient
from fusionrl.engines.engine import EngineActor, EngineSpec

EOS = 258
KEY = "a key of the test"


def sglang_engine(model: Path, log_dir: Path, max_total_tokens: int) -> EngineActor:
    """An SGLang server of `model` in fp32 with the key `KEY`, not yet started."""
    spec = EngineSpec(
        index=0,
        model_path=str(model),
        device="cpu",
        dtype="float32",
        tp_size=1,
        gpu_ids=(),
        host="127.0.0.1",
        api_key=KEY,
        log_dir=str(log_dir),
        seed=1,
        start_timeout_s=200.0,
        server_args={"max_total_tokens": max_total_tokens},
    )
    return EngineActor(spec)


@dataclass
class Turn:
    """What the engine samples: text and the token that ends it, or a stop string (None), or a finish of its own."""

    text: str
    end: int | None = EOS
    finish: dict[str, Any] | None = None


@dataclass
class Exchange:
    asked: dict[str, Any]
    tokens: list[int]
    log_probs: list[float]
    versions: list[int]


@dataclass
class Engine:
    """Serves `turns` one after another; `by_prompt(text)` chooses instead where several samples are made at once.

    before  is awaited before each answer
    """

    tokenizer: Any
    turns: list[Turn] = field(default_factory=list)
    by_prompt: Callable[[str], Turn] | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    before: Callable[[], Awaitable[object]] | None = None
    num_waiting: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.before is not None:
            self.num_waiting += 1
            await self.before()
        turn = self.by_prompt(self.tokenizer.decode(asked["input_ids"])) if self.by_prompt else self.turns.pop(0)
        tokens = self.tokenizer.encode(turn.text, add_special_tokens=False)
        tokens += [] if turn.end is None else [turn.end]
        finish = turn.finish or {"type": "stop", "matched": turn.end if turn.end is not None else turn.text[-1]}
        if len(tokens) > asked["sampling_params"]["max_new_tokens"]:
            tokens = tokens[: asked["sampling_params"]["max_new_tokens"]]
            finish = {"type": "length", "length": len(tokens)}
        log_probs = [-random.random() for _ in tokens]
        number = len(self.exchanges)
        cut = len(tokens) // 2
        spans = [{"version": str(number), "start": 0, "end": cut}]
        spans += [{"version": str(number + 1), "start": cut, "end": len(tokens)}]
        versions = [number] * cut + [number + 1] * (len(tokens) - cut)
        self.exchanges.append(Exchange(asked, tokens, log_probs, versions))
        meta = {
            "id": str(number),
            "finish_reason": finish,
            "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs, tokens, strict=True)],
            "weight_versions": spans,
        }
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return web.json_response({"text": text, "output_ids": tokens, "meta_info": meta})

    def serve(self, args: Any, use: Callable[[], Awaitable[Any]]) -> Any:
        """Run `use()` with this engine's address and a client of it on `args`."""

        async def run() -> Any:
            app = web.Application()
            app.router.add_post("/generate", self.answer)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0]
            args.router_url = f"http://{host}:{port}"
            async with GenerateClient(args.router_url, vocab_size=512) as args.generate_client:
                try:
                    return await use()
                finally:
                    await runner.cleanup()

        return asyncio.run(run())


def check_sample(sample: Sample, exchanges: list[Exchange]) -> list[list[int]]:
    """Compare a finished sample with what went over the wire, token by token; returns what stands between turns.

    Every request is a prefix of the sample, every sampled token is in it once with its own log-prob and version and
    the mask 1, and all others have mask 0, log-prob 0 and the version of the token before.
    """
    sample.validate()
    tokens = [int(token) for token in sample.tokens]
    start = sample.prompt_length
    sampled: dict[int, tuple[float, int]] = {}
    position, between = start, []
    for exchange in exchanges:
        asked = exchange.asked["input_ids"]
        assert tokens[: len(asked)] == asked
        assert len(asked) >= position
        between.append(tokens[position : len(asked)])
        for i, token in enumerate(exchange.tokens):
            assert tokens[len(asked) + i] == token
            sampled[len(asked) + i] = (exchange.log_probs[i], exchange.versions[i])
        position = len(asked) + len(exchange.tokens)
    between.append(tokens[position:])
    last = 0
    assert sample.loss_mask is not None and sample.rollout_log_probs is not None
    assert sample.weight_versions is not None
    for position in range(start, len(tokens)):
        log_prob, last = sampled.get(position, (0.0, last))
        i = position - start
        assert sample.loss_mask[i] == (position in sampled)
        assert abs(sample.rollout_log_probs[i] - log_prob) < 1e-6
        assert sample.weight_versions[i] == last
    assert between[0] == []
    return between[1:]


def check_log_probs(model: Path, sample: Sample) -> None:
    """Compare the log-probs of what was sampled with those of one forward pass over the whole sample."""
    import torch
    from transformers import AutoModelForCausalLM

    mask = np.asarray(sample.loss_mask, bool)
    ids = torch.from_numpy(np.asarray(sample.tokens, np.int64))[None]
    with torch.no_grad():
        scored = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()(ids)
    logits = scored.logits[0, sample.prompt_length - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, ids[0, sample.prompt_length :, None])[:, 0].numpy()
    np.testing.assert_allclose(np.asarray(sample.rollout_log_probs)[mask], expected[mask], atol=1e-4)
    assert not np.asarray(sample.rollout_log_probs)[~mask].any()
