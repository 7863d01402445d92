"""Layers of multi-token prediction: what they are built of, their loss, and what a micro-batch has for them.

Layer k of DeepSeek-V3's (arXiv 2412.19437, section 2.2; k counts from 1) makes of a token's hidden state and of the
embedding of the token k places after it a hidden state that predicts the token k + 1 places after it. Megatron-core has
the layer. Here its inputs and targets are made with the packed row on the host, so that no rank asks another for the
token after its own under context parallelism.

The decoder, the embedding and the output layer are read as they are: no gradient of this loss reaches them, and the
policy's gradients stay what they are, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec,
)
from torch import Tensor

from fusionrl.models.families import get_family
from fusionrl.models.shape import ModelShape
from fusionrl.trainer.layers import fitted_layer, plain_block_spec
from fusionrl.trainer.local_layers import LocalNorm

if TYPE_CHECKING:
    from fusionrl.trainer.packed_row import PackedRow


@dataclass
class Ahead:
    """What layer k computes of a micro-batch; M chosen tokens are on this rank."""

    tokens: Tensor  # [1, T] int64: of each token the one k places after it; 0 beyond the end of its sequence
    positions: Tensor  # [M] in this rank's packed row, of the tokens k + 1 places before a chosen one
    targets: Tensor  # [M] the chosen tokens' ids
    weight: float  # of each token's -log p in the loss: 1 / trained tokens of the optimizer step
    log_probs: Tensor | None = None  # [M] of the chosen tokens, once the last stage has computed them


def ahead_of(
    depth: int,
    row: PackedRow,
    sequences: Sequence[np.ndarray],
    chosen: Sequence[np.ndarray],
    num_tokens: int,
    device: torch.device,
) -> Ahead:
    """Find what layer `depth` computes of a packed row. `chosen`: places of trained tokens in each of its sequences."""
    after = np.zeros(row.local.numel(), np.int64)
    positions, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for tokens, places, row_places in zip(sequences, chosen, row.rows, strict=False):
        known = tokens[depth : depth + row_places.size]
        after[row_places[: known.size]] = known
        predicted = places[places > depth]
        positions.append(row_places[predicted - depth - 1])
        targets.append(tokens[predicted])
    local = row.local[torch.from_numpy(np.concatenate(positions))]
    here = local >= 0
    return Ahead(
        tokens=torch.from_numpy(after)[row.held][None].to(device),
        positions=local[here].to(device),
        targets=torch.from_numpy(np.concatenate(targets)).long()[here].to(device),
        weight=1.0 / max(num_tokens, 1),
    )


class PredictionLayer(MultiTokenPredictionLayer):
    """Megatron's layer; it is given the tokens whose embeddings it reads.

    hidden_first  the projection reads hidden states and then embeddings (MiMo), not the reverse
    """

    def __init__(self, *args: object, hidden_first: bool, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_first = hidden_first

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: object = None,
        **masks: object,
    ) -> tuple[object, ...]:
        with torch.no_grad():
            embeddings = embedding(input_ids=input_ids, position_ids=position_ids)
        both = (hidden_states, embeddings) if self.hidden_first else (embeddings, hidden_states)
        return input_ids, position_ids, *masks.values(), *both

    def _checkpointed_forward(self, *unused: object, **inputs: object) -> Tensor:
        """Recompute the layer in backward. Megatron's own refuses `block`, and saves more than tensors."""

        names = ("hidden_states", "decoder_input")

        def run(*both: Tensor) -> Tensor:
            hidden: Tensor = self._proj_and_transformer_layer(**(inputs | dict(zip(names, both, strict=True))))
            return hidden

        tensors = [tensor for name in names if isinstance(tensor := inputs[name], Tensor)]
        # Without a gradient of its inputs the recomputed part would have none at all.
        return checkpoint(run, False, *(x if x.requires_grad else x.detach().requires_grad_() for x in tensors))


def mtp_spec(
    transformer: TransformerConfig, shape: ModelShape, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules:
    """Spec of all layers of multi-token prediction, which stand on the last stage."""
    is_local = transformer.transformer_impl == "local"
    (*_, last) = plain_block_spec(transformer, vp_stage).layer_specs
    spec = get_mtp_layer_spec(fitted_layer(last, shape.mtp_kinds, transformer, shape), not is_local)
    names = get_family(shape.model_type).mtp
    assert names is not None, "the shape has asked for it"
    spec.module, spec.params = PredictionLayer, {"hidden_first": names.hidden_first}
    if is_local:
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = LocalNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * shape.mtp_layers)


def predict_ahead(
    model: GPTModel,
    hidden: Tensor,
    ahead: Sequence[Ahead],
    passed: Mapping[str, object],
    log_probs: Callable[[Tensor, Ahead], Tensor],
) -> None:
    """Fill the log-probs of `ahead`.

    hidden     [T / sequence parallel size, 1, h] what the decoder's last norm gives
    passed     the arguments that the decoder's layers had as well
    log_probs  (hidden states of a layer, its work) → log-probs [M]
    """
    hidden = hidden.detach()
    names = ("position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
    common = {name: passed.get(name) for name in names}
    for layer, work in zip(model.mtp.layers, ahead, strict=True):
        hidden, *_ = layer(
            input_ids=work.tokens, hidden_states=hidden, attention_mask=None, embedding=model.embedding, **common
        )
        work.log_probs = log_probs(hidden, work)


def further_loss(ahead: Sequence[Ahead]) -> tuple[Tensor, Tensor]:
    """(mean over layers and trained tokens of -log p, to be added up over ranks; the same times the trained tokens)."""
    sums = [-work.log_probs.sum() for work in ahead if work.log_probs is not None]
    total = torch.stack(sums).sum() / len(ahead)
    return total * ahead[0].weight, total.detach()
