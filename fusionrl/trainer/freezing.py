"""Parameters that are not trained: Megatron's buffers and its optimizer leave out what wants no gradient."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from fusionrl.models import families
from fusionrl.models.hf_io import local_tensors
from fusionrl.models.shape import ModelShape
from fusionrl.trainer.model import unwrap


def freeze(modules: list[torch.nn.Module], shape: ModelShape, frozen: Set[str]) -> None:
    """Freeze the parameters whose Megatron names are in `frozen`, before the model is wrapped."""
    if not frozen:
        return
    rules = families.model_rules(shape)
    sources = {name for megatron in frozen for name in rules[megatron].hf}
    for name, rule, tensor in local_tensors(modules, shape):
        if sources.issuperset(rule.hf):  # by these names also the copy of a tied embedding
            tensor.requires_grad_(False)
            if name.startswith("embedding."):
                _want_gradients(modules)


def _want_gradients(modules: list[torch.nn.Module]) -> None:
    """Let embeddings want gradients: layers that are computed again in backward have none without."""

    def want(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        wants = torch.is_grad_enabled() and not output.requires_grad
        return output.detach().requires_grad_() if wants else output

    for model in map(unwrap, modules):  # of several pipeline pieces one has it
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(want)
