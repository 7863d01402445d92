"""`fusionrl view`: a run's folder as one HTML file that opens offline, or one sample in a terminal.

    step_block  the samples of one rollout file, packed
    run_block   a run under a limit of bytes: which steps and samples are in, and what is left out
    page        the HTML file and its server; its scripts and its style are in assets/
    command     flags; one sample in the terminal, with coloured tokens

Nothing here imports torch, Ray or transformers: so viewing a live run stays cheap.
"""
