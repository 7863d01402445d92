"""The bare machine: what transformers and the matrix products alone take for the tokens of one GRPO step.

    python tools/bench/bare.py --model runs/smollm2-135m/model [--prompts 4 --samples 8 --new-tokens 32] [--turns 5]

`tools/bench/step.py` alternates these rows with a step of fusionrl; alone, the program prints them:

| row | what is timed |
|---|---|
| loop_dynamic | a plain loop over transformers' model with its dynamic cache: a forward pass of the prompts as one batch and one a further token, sampling, and each token's log-prob |
| loop_static | the same with its static cache |
| generate_products | the products with weights of those passes alone, `torch.mm` into memory that is there |
| forward_backward | transformers' forward and backward pass of prompts and responses as one batch; no optimizer |
| train_products | the products with weights of that alone: one forward, two backward |

The rows run in a process of its own, with the threads that an engine or a trainer has. No product is timed that has no
weights: those of attention are small here.
"""  # noqa: E501  # the table

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import Cache, PreTrainedModel

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
QUESTIONS = ["What is 12 plus 7?", "What is 35 plus 8?", "What is 41 plus 6?", "What is 28 plus 9?"]


def plain_loop(model: PreTrainedModel, prompts: Tensor, new_tokens: int, cache: Cache | None = None) -> Tensor:
    """Sample `new_tokens` for each of `prompts` [samples, prompt tokens]; return their log-probs [samples, new_tokens].

    One forward pass of the prompts, and one a further token. `cache`: of keys and values; None: a dynamic one.
    """
    import torch
    from transformers import DynamicCache

    if cache is None:
        cache = DynamicCache(config=model.config)
    tokens, chosen = prompts, []
    with torch.inference_mode():
        for _ in range(new_tokens):
            output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            log_probs = output.logits[:, -1].float().log_softmax(-1)
            tokens = torch.multinomial(log_probs.exp(), 1)
            chosen.append(log_probs.gather(1, tokens))
        return torch.cat(chosen, 1)


class Worker:
    """A process that prints a line when it is ready, and one for each line that it reads."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the process, and wait until it is ready.

        Raises:
            SystemExit: the process ended.
        """
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._read()
        except SystemExit:
            self.close()
            raise

    def ask(self, line: str) -> str:
        """Return the answer to `line`.

        Raises:
            SystemExit: the process ended.
        """
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it ended; `_read` reports that
            print(line, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the measuring process ended; see above")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # input that it has not read
            self._process.communicate()


class Bare:
    """The process that measures the rows; it waits between two turns."""

    def __init__(self, model: str, prompts: Sequence[str], new_tokens: int, precision: str, num_threads: int) -> None:
        """`prompts`: one a sample. They must have the same number of tokens.

        Raises:
            SystemExit: the process ended.
        """
        order = {"model": model, "prompts": list(prompts), "new_tokens": new_tokens, "dtype": DTYPES[precision]}
        this = str(Path(__file__).resolve())
        self._worker = Worker([sys.executable, this, "--serve", json.dumps(order), "--threads", str(num_threads)])

    def seconds(self) -> dict[str, float]:
        """Time of each row, measured once, one after the other."""
        seconds: dict[str, float] = json.loads(self._worker.ask("go"))
        return seconds

    def close(self) -> None:
        """End the process."""
        self._worker.close()


class Rows:
    """The rows of one model and batch: each a function that computes once."""

    def __init__(self, model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> None:
        """`prompts` [samples, prompt tokens]."""
        import torch

        self.model, self.prompts, self.new_tokens = model, prompts, new_tokens
        shape = (len(prompts), new_tokens)
        self.tokens = torch.cat([prompts, torch.randint(0, model.config.vocab_size, shape)], 1)
        head = model.get_output_embeddings()
        self._head: Tensor = head.weight.data
        self._layers = [m.weight.data for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        self._memory: dict[tuple[int, int, str], Tensor] = {}

    @property
    def functions(self) -> dict[str, Callable[[], None]]:
        """The rows by name."""
        return {
            "loop_dynamic": lambda: self.generate(is_static=False),
            "loop_static": lambda: self.generate(is_static=True),
            "generate_products": self.generate_products,
            "forward_backward": self.forward_backward,
            "train_products": self.train_products,
        }

    def generate(self, is_static: bool) -> None:
        """Sample the new tokens of every prompt, with their log-probs."""
        from transformers import StaticCache

        longest = self.tokens.size(1)
        cache = StaticCache(config=self.model.config, max_cache_len=longest) if is_static else None
        plain_loop(self.model, self.prompts, self.new_tokens, cache)

    def forward_backward(self) -> None:
        """The mean log-prob of the responses and its gradient, which is then dropped."""
        from torch.nn.functional import cross_entropy

        start = self.prompts.size(1)
        logits = self.model(self.tokens, use_cache=False).logits[:, start - 1 : -1]
        cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, start:].flatten()).backward()
        for parameter in self.model.parameters():
            parameter.grad = None

    def generate_products(self) -> None:
        """The products of the prompts' pass and of each further token's; the output layer sees one token a sample."""
        count = len(self.prompts)
        for step in range(self.new_tokens):
            num_rows = self.prompts.numel() if step == 0 else count
            for weight in self._layers:
                self._forward(weight, num_rows)
            self._forward(self._head, count)

    def train_products(self) -> None:
        """Of each weight: outputs, gradient of inputs, gradient of the weight."""
        import torch

        num_rows = self.tokens.numel()
        for weight in [*self._layers, self._head]:
            inputs, outputs = self._forward(weight, num_rows)
            torch.mm(outputs, weight, out=self._of(num_rows, weight.size(1), "gradient", weight))
            torch.mm(outputs.t(), inputs, out=self._of(*weight.shape, "gradient", weight))

    def _forward(self, weight: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        import torch

        inputs = self._of(num_rows, weight.size(1), "inputs", weight)
        outputs = self._of(num_rows, weight.size(0), "outputs", weight)
        return inputs, torch.mm(inputs, weight.t(), out=outputs)

    def _of(self, num_rows: int, num_columns: int, role: str, like: Tensor) -> Tensor:
        """Memory of this shape, the same at every call."""
        key = num_rows, num_columns, role
        if key not in self._memory:
            self._memory[key] = like.new_zeros(num_rows, num_columns)
        return self._memory[key]


def tokenize(model: str, prompts: Sequence[str]) -> torch.Tensor:
    """[samples, prompt tokens], without special tokens, as fusionrl gives prompts to its engines.

    Raises:
        SystemExit: prompts of different lengths.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    if len({len(row) for row in rows}) > 1:
        raise SystemExit("the prompts have different numbers of tokens: the plain loop has no padding")
    return torch.tensor(rows)


def serve(order: dict[str, object], num_threads: int) -> None:
    """Measure the rows once a line of the standard input; answer with a line of JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    path = str(order["model"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, str(order["dtype"])))
    rows = Rows(model, tokenize(path, order["prompts"]), int(order["new_tokens"]))  # type: ignore[arg-type,call-overload]
    for function in rows.functions.values():
        function()  # warm-up
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = {}
        for name, function in rows.functions.items():
            start = time.perf_counter()
            function()
            seconds[name] = time.perf_counter() - start
        print(json.dumps(seconds), flush=True)


def samples_of(num_prompts: int, num_samples: int) -> list[str]:
    """The prompt of each sample of a step."""
    return [QUESTIONS[i % len(QUESTIONS)] for i in range(num_prompts) for _ in range(num_samples)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve), options.threads)
        return
    prompts = samples_of(options.prompts, options.samples)
    bare = Bare(options.model, prompts, options.new_tokens, options.precision, options.threads)
    try:
        turns = [bare.seconds() for _ in range(options.turns)]
    finally:
        bare.close()
    for name in turns[0]:
        print(f"{name:18} {statistics.median(turn[name] for turn in turns):8.3f} s", flush=True)


if __name__ == "__main__":
    main()
