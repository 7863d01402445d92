"""A stalled run: `message` when to report it, and the line; `processes` where its processes are, and their stacks."""
