"""Room `trainer`: Megatron-core's side; model building, the train step, log-probs, checkpoints.

Imports neither sglang nor ray (but for pulling a shard by reference), and knows algorithms only as functions.
"""
