"""Model families of your own: one file each, named as config.json's model_type (docs/guides/own-model.md).

`mistral.py` has layers of known kinds, `short_conv.py` a kind of its own.
"""
