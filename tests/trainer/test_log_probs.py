"""Chunked log-probs and entropies against torch's log_softmax in float64."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.log_probs import chunked_log_probs
from tests.trainer.trainer_worker import config_of

VOCAB, PADDED, HIDDEN, COUNT = 37, 40, 12, 50
EACH = torch.linspace(0.3, 2.0, COUNT)  # a temperature of each token


def inputs(scale=1.0):
    generator = torch.Generator().manual_seed(1)
    hidden = scale * torch.randn(COUNT, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (COUNT,), generator=generator)
    grads = torch.randn(2, COUNT, generator=generator)
    return hidden, weight, targets, grads


def expected(temperature, entropy_grad, scale=1.0, vocab=VOCAB, dtype=torch.float64):
    """(log-probs, entropies, hidden gradient, weight gradient) by torch's autograd."""
    hidden, weight, targets, grads = inputs(scale)
    targets = targets % vocab
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight[:vocab].t()
    log_probs = ((logits if dtype == torch.float64 else logits.float()) / temperature).log_softmax(-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    loss = (chosen * grads[0].to(chosen.dtype)).sum()
    if entropy_grad:
        loss = loss + (entropy * grads[1].to(chosen.dtype)).sum()
    loss.backward()
    return chosen.detach(), entropy.detach(), hidden.grad, weight.grad


def ours(scale=1.0, vocab=VOCAB, dtype=torch.float32, frozen=None, own=slice(None), **options):
    """The same by the function under test; its gradients of weights are those of the rows `own`."""
    hidden, weight, targets, grads = inputs(scale)
    hidden, weight = hidden.to(dtype), weight[own].to(dtype).clone()
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    log_probs, entropy = chunked_log_probs(hidden, weight, targets % vocab, vocab_size=vocab, **options)
    loss = (log_probs * grads[0]).sum()
    if options.get("entropy_grad"):
        loss = loss + (entropy * grads[1]).sum()
    loss.backward()
    return log_probs, entropy, hidden.grad, weight.grad


def distances(got, want):
    return [((a.detach().double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


def check(got, want, bound=2e-5):
    assert max(distances(got, want)) <= bound


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize(
    ("temperature", "chunk_size"),
    [(1.0, None), (0.6, 1024), (0.6, 7), (1.7, 1), (EACH, None), (EACH, 7)],
)
def test_values_and_gradients(temperature, chunk_size, entropy_grad):
    found = ours(temperature=temperature, chunk_size=chunk_size, entropy_grad=entropy_grad)
    assert found[1].requires_grad == entropy_grad
    divisor = temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature
    check(found, expected(divisor, entropy_grad))
    assert not found[3][VOCAB:].any(), "rows that pad the vocabulary get no gradient"


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_bf16_is_as_near_to_float64_as_torch_is(chunk_size):
    found = ours(dtype=torch.bfloat16, temperature=0.6, chunk_size=chunk_size, entropy_grad=True)
    assert [x.dtype for x in found] == [torch.float32] * 2 + [torch.bfloat16] * 2
    want = expected(0.6, True)
    pairs = list(zip(distances(found, want), distances(expected(0.6, True, dtype=torch.bfloat16), want), strict=True))
    assert all(own <= 1.2 * torchs for own, torchs in pairs), pairs


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    gradients, want = ours(frozen=frozen, chunk_size=7)[2:], expected(1.0, False)[2:]
    place = ("hidden", "weight").index(frozen)
    assert gradients[place] is None
    check([gradients[1 - place]], [want[1 - place]])


class Largest(TorchDispatchMode):
    """The most values that any result of an operation had."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.values = max(self.values, x.numel())
        return result


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_the_logits_of_all_tokens_never_stand_in_memory(entropy_grad):
    hidden = torch.randn(256, 4).requires_grad_()
    weight = torch.randn(5000, 4).requires_grad_()
    with Largest() as largest:
        log_probs, entropy = chunked_log_probs(
            hidden, weight, torch.arange(256), vocab_size=5000, chunk_size=4, entropy_grad=entropy_grad
        )
        (log_probs.sum() + entropy.sum()).backward()
    assert largest.values == weight.numel() == 4 * 5000


def test_large_logits_stay_finite():
    log_probs, _, *gradients = ours(scale=200.0, entropy_grad=True)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert torch.allclose(log_probs.double(), expected(1.0, True, scale=200.0)[0], rtol=1e-4, atol=1e-2)


def test_no_tokens():
    hidden, weight, _, _ = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, _ = chunked_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.long), vocab_size=VOCAB)
    log_probs.sum().backward()
    assert log_probs.shape == (0,) and not weight.grad.any() and not hidden.grad.any()


def one_rank(actor, chunk_size, vocab):
    """This rank's log-probs, entropies and parts of the gradients, the vocabulary split in two."""
    half = PADDED // 2
    own = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    options = {"temperature": 0.6, "chunk_size": chunk_size, "entropy_grad": True, "group": dist.group.WORLD}
    return [x.detach().numpy() for x in ours(vocab=vocab, own=own, **options)]


@pytest.mark.parametrize(("chunk_size", "vocab"), [(1024, VOCAB), (7, VOCAB), (7, PADDED // 2 - 1)])
def test_vocabulary_split_over_two_ranks(workers, hf, chunk_size, vocab):
    """With the smallest vocabulary the second rank has padding alone."""
    workers.start(config_of(hf("llama", True)[0]), TrainerLayout(2))
    (first, second) = ([torch.tensor(x) for x in rank] for rank in workers.run(one_rank, chunk_size, vocab))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    joined = (first[0], first[1], first[2] + second[2], torch.cat([first[3], second[3]]))
    check(joined, expected(0.6, True, vocab=vocab))
