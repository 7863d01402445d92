"""Room `algorithms`: advantages, policy losses, KL and entropy terms, as plain functions, one file each.

Pure: imports neither ray, megatron nor sglang. A function here knows nothing of ranks, micro-batches or
models.
"""
