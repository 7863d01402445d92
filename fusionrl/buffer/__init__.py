"""Room `buffer`: the Buffer actor, the only owner of rollout data, and its data source.

Never imports megatron.
"""
