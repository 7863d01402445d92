"""The name `slime`: which slime modules and names exist here, and a finder that resolves imports of them.

`table.py` is pure: module path → name → where it lives here, or why it does not. `finder.py` makes modules of it.
"""
