"""Reward functions for `--custom-rm-path`, each `async reward(args, sample, **kwargs) -> float`."""
