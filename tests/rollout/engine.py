"""An HTTP engine that says what a test wrote down, and notes what it was asked; and SGLang's own, on a CPU."""

import asyncio
import importlib.util
import io
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from aiohttp import web

from fusionrl.config.config import Config
from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.client import GenerateClient
from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.rollout.image_requests import media_tokens
from fusionrl.rollout.sglang_rollout import sampling_params

EOS = 258
KEY = "a key of the test"


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip the test where one of the packages is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


def call(name: str, **arguments: Any) -> str:
    """A call of a tool as Qwen's models write it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def response(*contents: str) -> str:
    """What stands between two turns of the model where tools answered `contents` (template of the fixture `folder`)."""
    turns = "".join(f"<|im_start|>user\n<tool_response>\n{c}\n</tool_response><|im_end|>\n" for c in contents)
    return f"\n{turns}<|im_start|>assistant\n"


def sglang_engine(model: Path, log_dir: Path, max_total_tokens: int) -> EngineActor:
    """An SGLang server of `model` in fp32 with the key `KEY`, not yet started."""
    place: Any = {"index": 0, "tp_size": 1, "gpu_ids": (), "host": "127.0.0.1", "log_dir": str(log_dir)}
    run: Any = {"model_path": str(model), "device": "cpu", "dtype": "float32", "api_key": KEY, "seed": 1}
    limits: Any = {"start_timeout_s": 200.0, "server_args": {"max_total_tokens": max_total_tokens}}
    return EngineActor(EngineSpec(**place, **run, **limits))


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

    before       is awaited before each answer
    image_unit   pixels of the side of an image's token, in a model that sees
    """

    tokenizer: Any
    turns: list[Turn] = field(default_factory=list)
    by_prompt: Callable[[str], Turn] | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    before: Callable[[], Awaitable[object]] | None = None
    num_waiting: int = 0
    image_unit: int = 0

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
            "prompt_tokens": len(asked["input_ids"]) + self.num_repeated(asked),
        }
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return web.json_response({"text": text, "output_ids": tokens, "meta_info": meta})

    def num_repeated(self, asked: dict[str, Any]) -> int:
        """Placeholders that SGLang would add to those of a request."""
        sizes = [image.size for image in pictures(asked)]
        return sum(width * height // self.image_unit**2 - 1 for width, height in sizes)

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
            client = GenerateClient(args.router_url, vocab_size=512, media=media_tokens())
            async with client as args.generate_client:
                try:
                    return await use()
                finally:
                    await runner.cleanup()

        return asyncio.run(run())

    def texts(self, sample: Sample, exchanges: list[Exchange] | None = None) -> list[str]:
        """What stands between the turns of a sample, after a check of every token."""
        between = check_sample(sample, self.exchanges if exchanges is None else exchanges)
        return [self.tokenizer.decode(tokens) for tokens in between]


def pictures(asked: dict[str, Any]) -> list[Any]:
    """The images of a request, as PIL reads them."""
    from PIL import Image

    found = []
    for one in asked.get("image_data", ()):
        with urlopen(one) as file:  # a data: URI, or a file's
            found.append(Image.open(io.BytesIO(file.read())))
    return found


def prepare(folder: str, turns: list[Turn | str], **flags: Any) -> tuple[Any, Engine]:
    """(flags of a run with the tokenizer in `folder`, an engine that says `turns`)."""
    values = {"hf_checkpoint": folder, "rollout_max_response_len": 2000, "rollout_max_context_len": 6000}
    args = Config.from_flat(values | flags).to_args()
    return args, Engine(load_tokenizer(folder), [Turn(turn) if isinstance(turn, str) else turn for turn in turns])


def play(generate: Any, folder: str, sample: Sample, turns: list[Turn | str], **flags: Any) -> tuple[Any, Engine]:
    """(what `generate` makes of `sample` against such an engine, the engine)."""
    args, engine = prepare(folder, turns, **flags)
    return engine.serve(args, lambda: generate(args, sample, sampling_params(args))), engine


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
    columns: Any = (sample.loss_mask, sample.rollout_log_probs, sample.weight_versions)
    for position, (mask, log_prob, version) in enumerate(zip(*columns, strict=True), start):
        wanted, last = sampled.get(position, (0.0, last))
        assert (mask, version) == (position in sampled, last)
        assert abs(log_prob - wanted) < 1e-6
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
