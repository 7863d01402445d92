"""A server that answers `/generate` at once, as SGLang does: `python -m tests.buffer.answer_server NUM_TOKENS`."""

import asyncio
import itertools
import sys

import numpy as np
import orjson
from aiohttp import web

NUM_ANSWERS = 64  # different ones; the server cycles through them
VOCAB_SIZE = 150_000


def make_answer(number: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Return tokens, log-probs, and the body of an answer that carries them."""
    random = np.random.default_rng(number)
    tokens = random.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)
    log_probs = -random.exponential(0.5, num_tokens).astype(np.float32)
    meta = {
        "id": f"{number:032x}",
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": 6,
        "weight_version": "1",
        "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs.tolist(), tokens.tolist(), strict=True)],
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
    }
    text = "".join("abcdefghijklmnop"[t % 16] + "at " for t in tokens.tolist())
    return tokens, log_probs, orjson.dumps({"text": text, "output_ids": tokens.tolist(), "meta_info": meta})


def serve(num_tokens: int) -> None:
    """Print the port, then answer until standard input ends."""
    bodies = [make_answer(number, num_tokens)[2] for number in range(NUM_ANSWERS)]
    turns = itertools.cycle(bodies)

    async def generate(request: web.Request) -> web.Response:
        ids = orjson.loads(await request.read())["input_ids"]
        body = next(turns)
        if isinstance(ids[0], list):  # siblings with short answers share a request
            body = b"[" + b",".join([body, *(next(turns) for _ in ids[1:])]) + b"]"
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(run())


if __name__ == "__main__":
    serve(int(sys.argv[1]))
