"""Time and memory of log-probs and entropies with the output layer, forward and backward, against plain torch.

    python tools/bench/loss.py [--tokens 2048 --vocab 151936 --hidden 1024] [--precision bf16] [--device cuda]
    pip install --no-deps --target DIR verl==0.9.1 tensordict omegaconf && python tools/bench/loss.py --verl DIR
    .venv-trl/bin/python tools/bench/loss.py --trl      # after scripts/setup-trl-env.sh, with PYTHONPATH=.

Plain is what one writes first: `hidden @ weight.T`, log_softmax, gather, -sum p log p, and autograd; without entropy
gradient its entropy is made under no_grad. --verl adds verl's fused linear layer, --trl TRL's chunked one. All take
turns in one process. Seconds are medians, `/ plain` the median over turns of the ratio within a turn; CPU seconds are
those of all threads, which other processes disturb less.

Memory is the peak above what stood before (a CPU: resident, `VmHWM` of Linux; a GPU: torch's allocator), inputs thus
left out. `beyond gradients` also leaves out the gradients of hidden and weight, which every implementation returns:
the larger of forward's peak and backward's less their size. (Plain's may peak before they are there; it is then
measured too small, never ours.) Errors are against plain: the largest difference of a value, and the norm of a
gradient's difference over its norm. Exit code 1 where ours needs over 1.35 of plain's time, over a tenth of its memory
beyond the gradients, or differs by more than 1e-4 (bf16: 2e-2).
"""

import argparse
import ctypes
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fusionrl.trainer.log_probs import chunked_log_probs

MAX_TIME, MAX_MEMORY = 1.35, 0.1
MAX_ERROR = {"fp32": 1e-4, "bf16": 2e-2}
ERRORS = ("log-probs", "entropies", "gradient of hidden", "gradient of weight")
# (hidden [N, h], weight [V, h], targets [N], whether entropies are differentiable) -> log-probs [N], entropies [N]
LogProbs = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    log_probs = (hidden @ weight.t()).float().log_softmax(-1)
    with torch.set_grad_enabled(entropy_grad):
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], entropy


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    return chunked_log_probs(hidden, weight, targets, vocab_size=weight.size(0), entropy_grad=entropy_grad)


def verls(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    log_probs, entropy = FusedLinearForPPO()(hidden, weight, targets)
    return log_probs, entropy if entropy_grad else entropy.detach()


def trls(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    from trl.kernels import ChunkedLogProbFunction

    outputs = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 8192, None, 1.0, ("entropy",))
    return outputs[0], outputs[1] if entropy_grad else outputs[1].detach()


class Memory:
    """Peak bytes since `reset`, above those at the last `start`."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def start(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # else freed memory would count as standing
        self.base = torch.cuda.memory_allocated() if self.cuda else self._status("VmRSS")
        self.reset()

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS

    def peak(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.cuda else self._status("VmHWM")) - self.base

    @staticmethod
    def _status(name: str) -> int:
        match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert match, f"/proc/self/status has no {name}"
        return int(match[1]) * 1024


class Case:
    """Inputs, the same for all."""

    def __init__(self, options: argparse.Namespace) -> None:
        device = torch.device(options.device)
        dtype = torch.float32 if options.precision == "fp32" else torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        tensor_options = {"generator": generator, "device": device}
        self.hidden = torch.randn(options.tokens, options.hidden, **tensor_options).to(dtype).requires_grad_()
        # Logits of standard deviation 3.
        weight = torch.randn(options.vocab, options.hidden, **tensor_options).mul_(3 / options.hidden**0.5)
        self.weight = weight.to(dtype).requires_grad_()
        self.targets = torch.randint(0, options.vocab, (options.tokens,), **tensor_options)
        self.grads = torch.randn(2, options.tokens, **tensor_options)
        self.memory = Memory(device)

    def run(self, function: LogProbs, entropy_grad: bool) -> tuple[dict[str, float], list[Tensor]]:
        """(seconds and bytes; log-probs, entropies and both gradients) of one forward and backward."""
        self.hidden.grad = self.weight.grad = None
        self.memory.start()
        wall, cpu = time.perf_counter(), time.process_time()
        log_probs, entropy = function(self.hidden, self.weight, self.targets, entropy_grad)
        loss = (log_probs * self.grads[0]).sum()
        if entropy_grad:
            loss = loss + (entropy * self.grads[1]).sum()
        self._wait()
        forward = self.memory.peak()
        self.memory.reset()
        loss.backward()
        self._wait()
        figures = {"s": time.perf_counter() - wall, "CPU s": time.process_time() - cpu}
        backward = self.memory.peak()
        values = [log_probs.detach(), entropy.detach(), self.hidden.grad, self.weight.grad]
        returned = sum(grad.numel() * grad.element_size() for grad in values[2:])
        figures |= {"MiB": max(forward, backward) / 2**20}
        figures |= {"MiB beyond gradients": max(forward, backward - returned) / 2**20}
        return figures, values

    def _wait(self) -> None:
        if self.memory.cuda:
            torch.cuda.synchronize()


def errors(got: list[Tensor], want: list[Tensor]) -> dict[str, float]:
    """Return the difference of values and gradients from plain's."""
    values = [(a.float() - b.float()).abs().max() for a, b in zip(got[:2], want[:2], strict=True)]
    grads = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(got[2:], want[2:], strict=True)]
    return {name: value.item() for name, value in zip(ERRORS, values + grads, strict=True)}


def compare(case: Case, sides: dict[str, LogProbs], entropy_grad: bool, turns: int) -> dict[str, dict[str, float]]:
    """Each side's figures: medians over turns, ratios to plain, errors."""
    # A turn that is not timed: errors, and what libraries allocate once.
    want = case.run(plain, entropy_grad)[1]
    result = {name: errors(case.run(side, entropy_grad)[1], want) for name, side in sides.items() if name != "plain"}
    del want
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            rows[name].append(case.run(side, entropy_grad)[0])
    for name, figures in rows.items():
        medians = {key: statistics.median(row[key] for row in figures) for key in figures[0]}
        ratios = {
            f"{key} / plain": statistics.median(a[key] / b[key] for a, b in zip(figures, rows["plain"], strict=True))
            for key in figures[0]
        }
        result[name] = medians | ratios | result.get(name, {})
    return {name: result[name] for name in sides}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936, help="tokens of the vocabulary (Qwen3's)")
    parser.add_argument("--hidden", type=int, default=1024, help="size of a hidden state")
    parser.add_argument("--precision", choices=sorted(MAX_ERROR), default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="torch threads; without it torch's own choice")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--verl", type=Path, help="folder that verl is installed in")
    parser.add_argument("--trl", action="store_true", help="TRL as well, from this environment")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    sides: dict[str, LogProbs] = {"plain": plain, "fusionrl": ours}
    if options.verl:
        sys.path.append(str(options.verl))
        sides["verl"] = verls
    if options.trl:
        sides["trl"] = trls
    case = Case(options)
    device = torch.cuda.get_device_name() if case.memory.cuda else f"CPU, {torch.get_num_threads()} threads"
    size = f"[{options.tokens}, {options.vocab}], hidden {options.hidden}, {options.precision}"
    print(f"{size}, {device}, torch {torch.__version__}")
    failed, results = False, {}
    for entropy_grad in (False, True):
        comparison = results[f"entropy gradient: {entropy_grad}"] = compare(case, sides, entropy_grad, options.turns)
        print(f"\nentropy gradient: {entropy_grad}")
        columns = list(comparison["fusionrl"])
        print("| | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
        for name, row in comparison.items():
            print(f"| {name} | " + " | ".join(f"{row[c]:.3g}" if c in row else "" for c in columns) + " |", flush=True)
        row = comparison["fusionrl"]
        failed |= row["s / plain"] > MAX_TIME or row["MiB beyond gradients / plain"] > MAX_MEMORY
        failed |= max(row[name] for name in ERRORS) > MAX_ERROR[options.precision]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
