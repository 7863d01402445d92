"""Long answers of `/generate`, as SGLang writes them."""

import numpy as np
import orjson

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
