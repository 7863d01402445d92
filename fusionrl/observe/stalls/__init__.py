"""A stalled run: `thresholds` when to report it, `message` the line, `processes` and `stacks` where it is."""
