"""A user's functions within the policy loss: a correction for the engine's log-probs, a reduction to one number."""

from argparse import Namespace
from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, call_hook, flag_of, user_code
from fusionrl.trainer.context_parallel import sum_over_context_ranks
from fusionrl.trainer.packed_batch import MicroBatch
from fusionrl.trainer.settings import aggregation_of

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
