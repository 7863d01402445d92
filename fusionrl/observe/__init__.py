"""Everything that a run leaves behind and shows to a person: metrics, rollout files, the run's folder, progress,
curves.

Imports neither ray, megatron nor sglang; torch, tensorboard and matplotlib only inside the functions that
need them.
"""
