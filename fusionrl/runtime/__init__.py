"""Room `runtime`: a run from start to end: its loops, Ray actors and placement, recovery, watchdog, checkpoints."""
