"""`fusionrl view`: a run's folder as one HTML file that opens offline, or one sample in a terminal.

    series      metrics.jsonl in columns, and where a metric jumps
    step_block  the samples of one rollout file, packed
    run_block   a run under a limit of bytes: which steps and samples are in, and what is left out
    vocabulary  the text of a token, from tokenizer.json
    page        the HTML file; its scripts and its style are in assets/
    terminal    one sample with coloured tokens
    command     flags

Nothing here imports torch, Ray or transformers: so viewing a live run stays cheap.
"""
