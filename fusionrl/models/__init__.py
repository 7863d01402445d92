"""Room `models`: models as files: shape, families, tensor names of Hugging Face and Megatron.

A folder that a run cannot use is a `ValueError`, which names the flag, the file and the tensor.
"""
