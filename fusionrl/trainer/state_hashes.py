"""Fingerprints of a trainer rank's whole state, which resuming must restore to the last bit."""

from __future__ import annotations

import hashlib

import torch

from fusionrl.trainer.checkpoint import rng_state
from fusionrl.trainer.model import Trained, gather_params


def state_hashes(trained: Trained) -> dict[str, str]:
    """SHA-256 of this rank's weights, optimizer state and RNG states: equal only where all bits are."""
    gather_params(trained.chunks)
    weights, optimizer = hashlib.sha256(), hashlib.sha256()
    for chunk in trained.chunks:
        for name, param in chunk.named_parameters():
            weights.update(name.encode())
            weights.update(_bytes(param))
    for inner in trained.optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            scalars = [group.get(name) for name in ("step", "lr", "weight_decay")]
            optimizer.update(repr(scalars).encode())
            for param in group["params"]:
                optimizer.update(_bytes(param))
                for name, value in sorted(inner.optimizer.state[param].items()):
                    optimizer.update(name.encode())
                    optimizer.update(_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    state = rng_state()
    rng = hashlib.sha256(repr((state["python"], state["numpy"])).encode())
    for value in (
        state["torch"],
        state["device"],
        *(state["tracker"][key] for key in sorted(state["tracker"])),
    ):
        rng.update(_bytes(value))
    return {"weights": weights.hexdigest(), "optimizer": optimizer.hexdigest(), "rng": rng.hexdigest()}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
