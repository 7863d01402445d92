"""The flags of fusionrl: one pydantic group a topic, one field a flag; `Config` has them all.

A field `rollout_batch_size` is the flag `--rollout-batch-size`; its description is the help text and the line of
the flag reference. Names are slime's and Megatron's wherever the meaning is the same. Field names are unique over
all groups, so that hooks can be handed one flat namespace.
"""
