"""Names of speculative decoding; importing this imports nothing."""

FLAG = "--speculative-algorithm"
"""SGLang's flag."""
ALGORITHMS = ("NGRAM",)
"""Its values with which an engine runs on a CPU (`speculation.py`)."""
