"""A user's functions in the loss: a correction for the engine's log-probs, a reduction to one number, or all of it."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from fusionrl.algorithms.policy_losses import token_weights
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, call_hook, flag_of, user_code
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.trainer.loss import LossSums
from fusionrl.trainer.micro_batches import MicroBatch, Slicing
from fusionrl.trainer.packed_row import whole_row
from fusionrl.trainer.process_groups import sum_over_context_ranks
from fusionrl.trainer.settings import aggregation_of, loss_length
from fusionrl.trainer.train_hooks import as_rollout_data

TIS, REDUCER = "custom_tis_function_path", "custom_pg_loss_reducer_function_path"


class LossHooks:
    """`--custom-tis-function-path` and `--custom-pg-loss-reducer-function-path`, slime's.

    Both see whole responses, sample after sample; what is not trained on has loss, log-prob and mask 0. Under context
    parallelism each rank calls them with the tokens of all ranks, and takes what came out for its own.
    """

    def __init__(self, config: Config, args: Namespace) -> None:
        self.args, self.per_token = args, aggregation_of(config) == "token_mean"
        self.tis, self.reducer = getattr(config.algorithm, TIS), getattr(config.algorithm, REDUCER)

    def policy_loss(
        self, losses: Tensor, train_log_probs: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's policy loss, a share of the step's, from its tokens' [N]; and values of tokens to report.

        Raises HookError if a function raised, or returned what does not fit; ValueError if the engine's log-probs are
        to be corrected for, and the shard has none.
        """
        sizes = batch.response_lengths
        metrics: dict[str, Tensor] = {}
        responses, masks = self._whole(losses, batch), self._whole(batch.fields["loss_mask"], batch)
        lists = {"loss_masks": list(masks.split(sizes))}
        lists |= {"total_lengths": batch.total_lengths, "response_lengths": sizes}
        if self.tis is not None and batch.samples:
            responses, lists["loss_masks"], metrics = self._corrected(responses, train_log_probs, batch, lists)
        if self.reducer is not None and batch.samples:
            sizes_and_masks = (batch.total_lengths, sizes, lists["loss_masks"], self.per_token)
            reduce = call_hook(REDUCER, self.reducer, *sizes_and_masks)
            if not callable(reduce):
                raise HookError(f"{flag_of(REDUCER)} {self.reducer}: it returned no function")
            with user_code(f"{flag_of(REDUCER)} {self.reducer}", self.reducer):
                value = reduce(responses)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise HookError(f"{flag_of(REDUCER)} {self.reducer}: its function returned no tensor of one element")
            count = batch.num_tokens if self.per_token else batch.num_samples
            # Every context-parallel rank has reduced all of it, and each one's gradient reaches all of them.
            num_ranks = parallel_state.get_context_parallel_world_size()
            return value.reshape(()) / (max(count, 1) * num_ranks), metrics
        mask = torch.cat(lists["loss_masks"])[batch.responses.to(responses.device)] if batch.samples else 1.0
        return (batch.weights * mask * self._picked(responses, batch)).sum(), metrics

    def _corrected(
        self, losses: Tensor, train_log_probs: Tensor, batch: MicroBatch, lists: Mapping[str, object]
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        sizes, where = batch.response_lengths, f"{flag_of(TIS)} {self.tis}"
        if "rollout_log_probs" not in batch.fields:
            raise ValueError(
                f"{where}: the rollout has no log-probs of the engine (rollout_log_probs), which it corrects for; "
                "let the engines return them, or leave the flag out"
            )
        engine = self._whole(batch.fields["rollout_log_probs"], batch).split(sizes)
        trained = self._whole(train_log_probs, batch).split(sizes)
        keywords = {
            "args": self.args,
            "pg_loss": losses,
            "train_log_probs": list(trained),
            "rollout_log_probs": list(engine),
        }
        result = call_hook(TIS, self.tis, **keywords, **lists)
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], dict):
            raise HookError(f"{where}: it returned {type(result).__name__}; expected (pg_loss, loss_masks, metrics)")
        loss, masks, metrics = result
        if not isinstance(loss, Tensor) or loss.shape != losses.shape:
            raise HookError(
                f"{where}: its pg_loss must be a tensor of the shape {tuple(losses.shape)} that it was given"
            )
        if [part.numel() for part in masks] != sizes:
            raise HookError(f"{where}: its loss_masks must be as long as the responses, {sizes}")
        return loss, list(masks), {name: self._picked(value, batch) for name, value in metrics.items()}

    def _whole(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """[N] of chosen tokens -> [response tokens] of all context-parallel ranks, 0 where none is chosen."""
        filled = values.new_zeros(sum(batch.response_lengths)).index_put((batch.responses.to(values.device),), values)
        join = sum_over_context_ranks()  # a token is on one rank, so the sum is its value
        return filled if join is None else join(filled)

    def _picked(self, responses: Tensor | float, batch: MicroBatch) -> Tensor:
        responses = torch.as_tensor(responses, device=batch.weights.device)
        places = batch.responses.to(responses.device)
        return responses.expand(places.numel()) if responses.dim() == 0 else responses.reshape(-1)[places]


FIELD = "custom_loss_function_path"


class CustomLoss:
    """The user's loss of one optimizer step's micro-batches.

    `loss_fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`:

    batch               the lists of `as_rollout_data` for the micro-batch's samples, with unconcat_tokens, tokens (the
                        packed row) and packed_seq_params
    logits              [1, T, V / tp] with gradient: token `starts[i] + j` is token j of sample i, at any
                        context-parallel size; the vocabulary is split as Megatron splits it, and what pads it is
                        improbable
    sum_of_sample_mean  values of all response tokens, sample after sample, in one tensor -> their mean over the whole
                        step as the loss takes it (--loss-aggregation), of which this is one summand; what it
                        gives adds up over micro-batches and ranks

    Raises HookError if the function raised, or did not return a loss.
    """

    def __init__(
        self, config: Config, make_args: Callable[[], Namespace], vocab_size: int, shard: TrainShard, step: TrainStep
    ) -> None:
        """`make_args` gives a fresh copy of the flags."""
        self.config, self.make_args, self.vocab_size, self.step = config, make_args, vocab_size, step
        self.path = str(config.algorithm.custom_loss_function_path)
        self._data = as_rollout_data(shard)

    def __call__(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, LossSums]:
        """As `loss.micro_batch_loss`; `output` [1, T, V / tp] are the logits of this rank's tokens."""
        if not batch.samples:
            zero = output.new_zeros((), dtype=torch.float64)
            return output.sum() * 0.0, LossSums({}, {"tokens": zero}, sequence_sums={"sequences": zero})
        logits, group = self._without_padding(output), parallel_state.get_context_parallel_group()
        if group.size() > 1:
            logits = whole_row(logits[0], batch.layout.lengths, group)[None]
        data = self._of(batch)
        counts = {"tokens": torch.cat(data["loss_masks"]).sum()}
        sizes = data.get("attempt_tokens") or [float(mask.sum()) for mask in data["loss_masks"]]
        shares = [mask.sum() / max(size, 1e-12) for mask, size in zip(data["loss_masks"], sizes, strict=True)]
        counts["sequences"] = torch.stack(shares).sum()
        returned = call_hook(FIELD, self.path, self.make_args(), data, logits, self._reducer(data))
        loss, metrics = self._checked(returned)
        # Every context-parallel rank has computed all of it, and each one's gradient reaches all of them.
        size = group.size()
        loss = loss / size
        sums = {"loss": loss} | {name: torch.as_tensor(value, device=loss.device) for name, value in metrics.items()}
        reported = {name: value.detach().double() / (1 if name == "loss" else size) for name, value in sums.items()}
        num = {name: value.double() / size for name, value in counts.items()}
        return loss, LossSums(reported, {"tokens": num["tokens"]}, sequence_sums={"sequences": num["sequences"]})

    def _without_padding(self, logits: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        num_valid = self.vocab_size - group.rank() * logits.size(-1)
        if num_valid >= logits.size(-1):
            return logits
        padding = torch.arange(logits.size(-1), device=logits.device) >= num_valid
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min / 4)

    def _checked(self, returned: object) -> tuple[Tensor, dict[str, Tensor]]:
        where = f"{flag_of(FIELD)} {self.path}"
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
            raise HookError(f"{where}: it returned {type(returned).__name__}; expected (loss, dict of metrics)")
        loss, metrics = returned
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise HookError(f"{where}: its loss must be a tensor of one element with a gradient")
        for name, value in metrics.items():
            if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
                raise HookError(f"{where}: its metric {name!r} is not a single number")
        return loss.reshape(()), {name: torch.as_tensor(value).reshape(()) for name, value in metrics.items()}

    def _of(self, batch: MicroBatch) -> dict[str, Any]:
        device = batch.tokens.device
        chosen: dict[str, Any] = {}
        for name, values in self._data.items():
            picked = [values[i] for i in batch.samples]
            chosen[name] = [v.to(device) if isinstance(v, Tensor) else v for v in picked]
        chosen["unconcat_tokens"] = chosen["tokens"]
        row = torch.zeros(sum(batch.layout.lengths), dtype=torch.int64, device=device)
        for start, tokens in zip(batch.starts, chosen["tokens"], strict=True):
            row[start : start + tokens.numel()] = tokens
        chosen["tokens"], chosen["starts"], chosen["packed_seq_params"] = row[None], batch.starts, batch.layout
        return chosen

    def _reducer(self, data: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
        step = self.step
        settings = (aggregation_of(self.config), step.num_tokens, step.num_samples, loss_length(self.config))
        masks = data["loss_masks"]
        sizes = data.get("attempt_tokens") or [None] * len(masks)
        parts = (token_weights(m.cpu().numpy(), *settings, size) for m, size in zip(masks, sizes, strict=True))
        weights = torch.cat([torch.from_numpy(part) for part in parts]).to(masks[0])

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            # Not a product: what is masked may be anything, and 0 times infinity is NaN.
            return (torch.where(weights > 0, values.reshape(-1), 0.0) * weights).sum()

        return sum_of_sample_mean


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    starts: Sequence[int] | None = None,
    **kwargs: object,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probs, with gradient, of a custom loss's response tokens, at the rollout's temperature.

    logits: [1, T, V / tp] as the loss function got them
    args: the flags
    unconcat_tokens, total_lengths, response_lengths: of its batch
    with_entropy: the entropies too
    starts: of its batch. Default: all samples of the micro-batch follow each other, in its order.

    Returns (an empty tensor, {"log_probs": one [response_length] a sample, "entropy": the same}); slime's shape. Raises
    ValueError if there are no `starts` and the samples are not those of the row.
    """
    rows, targets = [], []
    if starts is None:
        starts = _packed_starts(total_lengths, logits.size(1))
    for tokens, total, length, first in zip(unconcat_tokens, total_lengths, response_lengths, starts, strict=True):
        rows.append(torch.arange(first + total - length - 1, first + total - 1, device=logits.device))
        targets.append(tokens[total - length :])
    chosen = (logits[0].index_select(0, torch.cat(rows)) / args.rollout_temperature).float()  # [N, V / tp]
    group = parallel_state.get_tensor_model_parallel_group()
    peak = chosen.detach().amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = chosen - peak[:, None]
    exp = shifted.exp()
    columns = torch.cat(targets) - group.rank() * chosen.size(1)
    is_here = (columns >= 0) & (columns < chosen.size(1))
    of_targets = shifted.gather(-1, columns.clamp(0, chosen.size(1) - 1)[:, None])[:, 0] * is_here
    # Each rank has its part of the vocabulary, and computes the same loss of the sums: gradients are not added up.
    parts = [exp.sum(-1), of_targets, *([(exp * shifted).sum(-1)] if with_entropy else [])]
    sums = reduce_from_tensor_model_parallel_region(torch.stack(parts), group)
    lse, sizes = sums[0].log(), list(response_lengths)
    outputs = {"log_probs": list((sums[1] - lse).split(sizes))}
    if with_entropy:
        outputs["entropy"] = list((lse - sums[2] / sums[0]).split(sizes))
    return logits.new_zeros(0), outputs


def _packed_starts(total_lengths: Sequence[int], size: int) -> list[int]:
    """Return where the samples start in a row of `size` tokens that holds them all, each padded as `Slicing` says."""
    cp, tp = parallel_state.get_context_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    for sequence_parallel_size in (tp, 1):  # passed-through flags can switch sequence parallelism off
        multiple = Slicing(cp_size=cp, sequence_parallel_size=sequence_parallel_size).multiple
        ends = list(accumulate((-(-total // multiple) * multiple for total in total_lengths), initial=0))
        if ends[-1] == size:  # then each sample has its own padding, so no other multiple gives other starts
            return ends[:-1]
    raise ValueError(
        f"get_log_probs_and_entropy: samples of {list(total_lengths)} tokens do not fill the packed row of {size}; "
        'for a choice of the samples give starts=, their entries of batch["starts"]'
    )
