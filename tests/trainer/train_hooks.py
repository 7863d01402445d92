"""Functions of a user's in the trainers, for tests."""

from types import SimpleNamespace
from typing import Any

import torch

from fusionrl.plugin_api import get_log_probs_and_entropy


def ppo_with_kl(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """What --use-kl-loss and --entropy-coef give, written out."""
    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        starts=batch["starts"],
    )
    log_probs, entropy = torch.cat(found["log_probs"]), torch.cat(found["entropy"])
    old, reference, advantages = (torch.cat(batch[k]) for k in ("log_probs", "ref_log_probs", "advantages"))
    ratio = (log_probs - old).exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip))
    kl = (reference - log_probs).exp() - 1 - (reference - log_probs)
    losses = [sum_of_sample_mean(part) for part in (policy, kl, entropy)]
    loss = losses[0] + args.kl_loss_coef * losses[1] - args.entropy_coef * losses[2]
    names = ("pg_loss", "kl_loss", "entropy")
    return loss, {name: part.detach() for name, part in zip(names, losses, strict=True)}


def ppo_as_in_slime(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """The same of a program that knows nothing of `starts`."""
    return ppo_with_kl(args, batch | {"starts": None}, logits, sum_of_sample_mean)


def ppo_of_some(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """It leaves the first sample out and does not say where the others stand."""
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    get_log_probs_and_entropy(logits, args=args, **{name: batch[name][1:] for name in names})


def knows_its_data(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """A loss that looks at metadata and a user's own column."""
    for index, length in enumerate(batch["response_lengths"]):
        assert batch["metadata"][index] == {"note": {"length": length}}, batch["metadata"]
        assert batch["weight_of_mine"][index] == length
    return logits.sum() * 0.0, {"seen": float(len(batch["tokens"]))}


def of_logits(args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """A loss that all weights have a gradient of."""
    return logits.float().square().mean(), {}


def no_tuple(args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    return logits.sum()


def no_gradient(args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    return torch.zeros(()), {}


def doubled(args: Any, rollout_data: dict[str, Any]) -> None:
    """Advantages of twice the rewards."""
    pairs = zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True)
    rollout_data["advantages"] = rollout_data["returns"] = [torch.full((n,), 2 * reward) for reward, n in pairs]


def forgets(args: Any, rollout_data: dict[str, Any]) -> None:
    del rollout_data["advantages"]


def too_short(args: Any, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = [part[:-1] for part in rollout_data["advantages"]]


def only_first_halves(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Train on the first half of each response alone."""
    for mask in rollout_data["loss_masks"]:
        mask[(mask.numel() + 1) // 2 :] = 0


def masks_the_third(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    for index, mask in zip(rollout_data["sample_indices"], rollout_data["loss_masks"], strict=True):
        mask *= int(index != 2)


def plain_gradient(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any, sequences: Any, options: Any) -> Any:
    return -advantages * log_probs, {"mine": advantages}


def a_mean(log_probs: Any, *rest: Any) -> Any:
    return log_probs.mean(), {}


def bare(log_probs: Any, *rest: Any) -> Any:
    return log_probs


def unmasks(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    for mask in rollout_data["loss_masks"]:
        mask[:] = 1


def other_rewards(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["rewards"] = [0.5 for _ in rollout_data["rewards"]]


def truncated(
    *, args: Any, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **lengths: list[int]
) -> Any:
    """Truncated importance sampling, as slime's users write it."""
    response_lengths = lengths["response_lengths"]
    assert [part.numel() for part in loss_masks] == response_lengths
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    return pg_loss * ratio.clamp(0.0, 1.5), loss_masks, {"mine": ratio}


def sequence_weights(
    args: Any, *, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **lengths: list[int]
) -> Any:
    """A weight and a rejection of whole responses, in slime's style: gathered, decided, cut for this rank again."""
    from slime.backends.megatron_utils import cp_utils

    total_lengths, response_lengths = lengths["total_lengths"], lengths["response_lengths"]
    gather, cut_for_rank = cp_utils.all_gather_with_cp, cp_utils.slice_log_prob_with_cp
    sizes = list(zip(total_lengths, response_lengths, strict=True))
    weights, masks, kept = [], [], []
    for own, engine, mask, size in zip(train_log_probs, rollout_log_probs, loss_masks, sizes, strict=True):
        gap = gather(own, *size) - gather(engine, *size)
        # The tests' engine finds their tokens likelier by about so many nats.
        mean = (gap * mask).sum() / mask.sum().clamp(min=1) + 2.3
        keep = (mean < 0.0).float()
        weights.append(mean.exp().clamp(max=3.0).expand(len(mask)))
        masks.append(mask * keep)
        kept.append(cut_for_rank(keep.expand(len(mask)).contiguous(), *size))
    cut = torch.cat([cut_for_rank(one, *size) for one, size in zip(weights, sizes, strict=True)])
    # As in slime's own reducers: a sum over the samples, which nothing here uses but for its gradient of zero.
    nothing = 0.0 * cp_utils.get_sum_of_sample_mean(total_lengths, response_lengths, masks)(pg_loss)
    return pg_loss * cut + nothing, masks, {"kept": torch.cat(kept), "weight": cut}


def wrong_shape(*, pg_loss: torch.Tensor, loss_masks: Any, **kwargs: Any) -> Any:
    return pg_loss[:-1], loss_masks, {}


def by_constant(total_lengths: Any, response_lengths: Any, loss_masks: list[torch.Tensor], per_token: bool) -> Any:
    """Dr. GRPO's: sums over 40."""
    assert not per_token
    return lambda values: sum(
        (part * mask).sum() / 40.0 for part, mask in zip(values.split(response_lengths), loss_masks, strict=True)
    )


def doubled_number(total_lengths: Any, response_lengths: Any, loss_masks: Any, per_token: bool) -> float:
    return 2.0


def _gpt(config: Any, like: Any, **stage: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    names = ("vocab_size", "max_sequence_length", "share_embeddings_and_output_weights", "rotary_base")
    sizes = {name: getattr(like, name) for name in names}
    spec = layer_spec(None, config, stage["vp_stage"])
    return GPTModel(config, spec, position_embedding_type="rope", **sizes, **stage)


def plain_gpt(pre_process: bool, post_process: bool, vp_stage: Any = None, *, config: Any, usual: Any) -> Any:
    """A GPTModel as Megatron's users build it. Its first norm is not trained; a hook keeps a matrix as it is."""
    model = _gpt(config, usual(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    if pre_process:
        model.decoder.layers[0].input_layernorm.requires_grad_(False)
        model.decoder.layers[0].mlp.linear_fc2.weight.register_hook(torch.zeros_like)
    return model


def layer_spec(args: Any, config: Any, vp_stage: Any) -> Any:
    """Slime's --spec: the layers, from the flags and Megatron's configuration."""
    from fusionrl.trainer.local_layers import local_block_spec

    assert (args is None or args.lr >= 0) and config.num_layers > 0
    return local_block_spec(config, vp_stage)


def spec_provider(args: Any, config: Any, vp_stage: Any) -> Any:
    """The same with a function that builds the stage."""
    from fusionrl.models.shape import read_model_shape

    shape = read_model_shape(args.hf_checkpoint)
    like = SimpleNamespace(
        vocab_size=shape.vocab_size + -shape.vocab_size % 8,
        max_sequence_length=shape.max_position_embeddings,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        rotary_base=shape.rope_theta,
    )

    def provider(pre_process: bool, post_process: bool, vp_stage: Any = None) -> Any:
        return _gpt(config, like, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)

    return provider


def no_spec(args: Any, config: Any, vp_stage: Any) -> Any:
    return 3


def returns_nothing(args: Any, config: Any, vp_stage: Any) -> None:
    """Without its return statement."""


def builds_none(args: Any, config: Any, vp_stage: Any) -> Any:
    return lambda pre_process, post_process, vp_stage=None: 3


def no_model(pre_process: bool, post_process: bool, vp_stage: Any = None) -> Any:
    return torch.nn.Linear(1, 1)


def raises(*args: Any, **kwargs: Any) -> None:
    raise KeyError("mine")


def say(args: Any, *rest: Any) -> None:
    """Write down that it was called, and what with."""
    with open(args.seen, "a") as out:
        names = [type(part).__name__ if not isinstance(part, int | str) else repr(part) for part in (args, *rest)]
        out.write(" ".join(names) + "\n")


def makes_what_raises(*args: Any) -> Any:
    return raises


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise KeyError("mine")


def raises_in_backward(args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    return _Raises.apply(logits), {}


def raises_in_forward(pre_process: bool, post_process: bool, vp_stage: Any = None, *, usual: Any) -> Any:
    model = usual()
    model.register_forward_pre_hook(raises)
    return model
