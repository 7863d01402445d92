"""fusionrl: reinforcement learning of language models, Megatron-core training fused with SGLang generation."""

__version__ = "0.1.0"
