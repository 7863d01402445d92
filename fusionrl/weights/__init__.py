"""Room `weights`: Hugging Face ↔ Megatron names and layouts, files, and the push of weights to the engines.

`families` and the sync plan are pure (no ray, megatron, sglang); nothing here imports sglang's server.
"""
