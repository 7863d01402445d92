"""Model families of your own: one file each, named as config.json's model_type. `mistral.py` is an example."""
