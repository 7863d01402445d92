"""Chunked log-probs and entropies against torch's log_softmax in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fusionrl.trainer.log_probs import chunked_log_probs

VOCAB, PADDED, HIDDEN, COUNT = 37, 40, 12, 50


def inputs(scale=1.0):
    generator = torch.Generator().manual_seed(1)
    hidden = scale * torch.randn(COUNT, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (COUNT,), generator=generator)
    grads = torch.randn(2, COUNT, generator=generator)
    return hidden, weight, targets, grads


def expected(temperature, entropy_grad, scale=1.0):
    """(log-probs, entropies, hidden gradient, weight gradient) by autograd in float64."""
    hidden, weight, targets, grads = inputs(scale)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    log_probs = (hidden @ weight[:VOCAB].t() / temperature).log_softmax(-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    loss = (chosen * grads[0].double()).sum()
    if entropy_grad:
        loss = loss + (entropy * grads[1].double()).sum()
    loss.backward()
    return chosen.detach(), entropy.detach(), hidden.grad, weight.grad


def check(got, want, bound=2e-5):
    for ours, theirs in zip(got, want, strict=True):
        assert ((ours.detach().double() - theirs).norm() / theirs.norm()).item() <= bound


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize(("temperature", "chunk_size"), [(1.0, 1024), (0.6, 1024), (0.6, 7), (1.7, 50)])
def test_values_and_gradients(temperature, chunk_size, entropy_grad):
    hidden, weight, targets, grads = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = chunked_log_probs(
        hidden,
        weight,
        targets,
        vocab_size=VOCAB,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy_grad=entropy_grad,
    )
    assert entropy.requires_grad == entropy_grad
    loss = (log_probs * grads[0]).sum() + ((entropy * grads[1]).sum() if entropy_grad else 0.0)
    loss.backward()
    check((log_probs, entropy, hidden.grad, weight.grad), expected(temperature, entropy_grad))
    assert not weight.grad[VOCAB:].any(), "rows that pad the vocabulary get no gradient"


def test_large_logits_stay_finite():
    hidden, weight, targets, grads = inputs(scale=200.0)
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, vocab_size=VOCAB, entropy_grad=True)
    ((log_probs * grads[0]).sum() + (entropy * grads[1]).sum()).backward()
    want = expected(1.0, True, scale=200.0)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()
    assert torch.allclose(log_probs.double(), want[0], rtol=1e-4, atol=1e-2)


def test_no_tokens():
    hidden, weight, _, _ = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, _ = chunked_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.long), vocab_size=VOCAB)
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert not weight.grad.any()
    assert not hidden.grad.any()


def one_rank(actor, chunk_size):
    """This rank's log-probs, entropies and parts of the gradients, the vocabulary split in two."""
    hidden, weight, targets, grads = inputs()
    rank, half = dist.get_rank(), PADDED // 2
    hidden.requires_grad_()
    own = weight[rank * half : (rank + 1) * half].clone().requires_grad_()
    log_probs, entropy = chunked_log_probs(
        hidden,
        own,
        targets,
        vocab_size=VOCAB,
        temperature=0.6,
        chunk_size=chunk_size,
        entropy_grad=True,
        group=dist.group.WORLD,
    )
    ((log_probs * grads[0]).sum() + (entropy * grads[1]).sum()).backward()
    return [x.detach().numpy() for x in (log_probs, entropy, hidden.grad, own.grad)]


@pytest.mark.parametrize("chunk_size", [1024, 7])
def test_vocabulary_split_over_two_ranks(workers, hf, chunk_size):
    from fusionrl.plan.layout import TrainerLayout
    from tests.trainer.trainer_worker import config_of

    workers.start(config_of(hf("llama", True)[0]), TrainerLayout(2))
    (first, second) = ([torch.tensor(x) for x in rank] for rank in workers.run(one_rank, chunk_size))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    joined = (first[0], first[1], first[2] + second[2], torch.cat([first[3], second[3]]))
    check(joined, expected(0.6, True))
