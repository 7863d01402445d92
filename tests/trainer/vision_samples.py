"""Samples with images of a tiny model that sees, and transformers' loss and gradients of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.data.train_batch import ShardSpan, TrainShard
from tests import tiny_kimi
from tests.tiny_vision import IMAGE, Reference, patch_of, random_image
from tests.trainer.trainer_worker import Samples

SIZES = {"a": (4, 4), "b": (6, 8), "c": (10, 4), "d": (4, 4)}  # columns and rows of patches; windows divide not all


class VisionSamples(Samples):
    """Text alone, one image, two, one in a later turn (mask 0), the same text with another image, one at the start.

    The first two have the same prompt.
    """

    def __init__(self, kind: str, seed: int = 0) -> None:
        patch, random = patch_of(kind), np.random.default_rng(seed)
        self.images = {key: random_image(ord(key), *size, patch=patch) for key, size in SIZES.items()}
        head, tail = random.integers(0, 250, 5).tolist(), random.integers(0, 250, 7).tolist()

        def text(count: int) -> list[int]:
            return random.integers(0, 250, count).tolist()

        plans: list[tuple[list[Any], list[Any]]] = [
            ([*head, "a", *tail], text(9)),
            ([*head, "a", *tail], text(6)),
            ([*head, "d", *tail], text(8)),
            (text(12), text(5)),
            ([*text(3), "b", *text(2), "c", *text(4)], text(11)),
            ([*text(4), "a", *text(3)], [*text(10), "c", *text(9)]),
            (text(30), text(3)),
            (["b", *text(2)], text(4)),
        ]
        super().__init__(len(plans), seed=seed)
        self.spans: list[list[ShardSpan]] = []
        for i, (prompt, response) in enumerate(plans):
            tokens, spans = self._expanded([*prompt, *response])
            count = len(tokens) - len(self._expanded(prompt)[0])
            self.tokens[i], self.total[i], self.response[i] = np.array(tokens, np.int32), len(tokens), count
            self.mask[i] = (self.tokens[i][-count:] != IMAGE).astype(np.float32)
            self.log_probs[i] = (-5.0 * random.random(count)).astype(np.float32)
            self.spans.append(spans)

    def _expanded(self, parts: Sequence[int | str]) -> tuple[list[int], list[ShardSpan]]:
        tokens: list[int] = []
        spans: list[ShardSpan] = []
        for part in parts:
            if isinstance(part, str):
                columns, rows = SIZES[part]
                spans.append((len(tokens), part, (1, rows, columns)))
                tokens += [IMAGE] * (rows * columns // 4)
            else:
                tokens.append(part)
        return tokens, spans

    def shard(self, steps: Sequence[Sequence[Sequence[int]]], counts: Sequence[tuple[int, int]]) -> TrainShard:
        shard = super().shard(steps, counts)
        spans = [self.spans[i] for i in shard.fields["sample_index"].tolist()]
        keys = {key for of_sample in spans for _, key, _ in of_sample}
        return replace(shard, spans=spans, images={key: self.images[key] for key in sorted(keys)})

    def reference(
        self, folder: str | Path, model: Any = None, as_text: bool = False
    ) -> tuple[list[np.ndarray], float, dict[str, np.ndarray]]:
        """(log-probs of each response, loss of one step of SFT, gradients by the trainer's names) by transformers.

        as_text  tokens of images have places as text has
        """
        import torch

        seeing, total, log_probs = Reference(folder, model), torch.zeros(()), []
        for tokens, spans, mask in zip(self.tokens, self.spans, self.mask, strict=True):
            images = [self.images[key] for _, key, _ in spans]
            inputs = seeing.inputs(tokens[:-1].tolist(), images)
            if as_text:
                inputs["position_ids"] = torch.arange(len(tokens) - 1).expand(3, 1, -1)
            logits = seeing.model(**inputs, use_cache=False).logits[0]
            labels = torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
            own = logits.log_softmax(-1).gather(1, labels)[-mask.size :, 0]
            total = total - (own * torch.from_numpy(mask)).sum()
            log_probs.append(own.detach().numpy())
        loss = total / sum(float(mask.sum()) for mask in self.mask)
        loss.backward()
        return log_probs, loss.item(), gradients_of(seeing.model)


def gradients_of(model: Any) -> dict[str, np.ndarray]:
    """The trainer's names → gradients, those of experts one by one."""
    if model.config.model_type == "kimi_k25":
        named = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        return {name: x.numpy() for name, x in tiny_kimi.text_names(tiny_kimi.published(model, named)).items()}
    found: dict[str, np.ndarray] = {}
    for name, param in model.named_parameters():
        if param.grad is None:
            continue
        name, grad = name.replace("model.language_model.", "model.").replace("model.visual.", "visual."), param.grad
        head, _, tail = name.partition(".experts.")
        for expert, part in enumerate(grad if tail else ()):
            parts = (
                {"gate_proj": part.chunk(2)[0], "up_proj": part.chunk(2)[1]} if tail == "gate_up_proj" else {tail: part}
            )
            found |= {f"{head}.experts.{expert}.{key}.weight": value.numpy() for key, value in parts.items()}
        if not tail:
            found[name] = grad.numpy()
    return found
