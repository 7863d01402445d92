"""The flags of fusionrl: one pydantic group a topic, one field a flag, with slime's and Megatron's names if they fit.

Field names are unique over all groups, so that hooks can be handed one flat namespace.
"""
