"""Room `algorithms`: advantages, policy losses, KL and entropy terms, as plain functions.

Pure: imports neither ray, megatron nor sglang. A function here knows nothing of ranks, micro-batches or
models.
"""
