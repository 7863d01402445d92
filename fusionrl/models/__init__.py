"""Room `models`: models as files: shape, families, tensor names of Hugging Face and Megatron."""
