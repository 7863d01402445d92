"""What a run leaves behind and what a person sees of it: metrics, rollout files, the run's folder, progress,
curves.

Imports neither ray, megatron nor sglang; torch, tensorboard and matplotlib only inside the functions that
need them.
"""
