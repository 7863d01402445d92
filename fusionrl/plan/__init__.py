"""Room `plan`: what a run will do, worked out from its configuration before anything starts.

Pure: imports neither ray, megatron nor sglang. `Plan` is what --dry-run prints and every actor receives. A flag that
the run cannot satisfy raises a `ValueError` with the flag, its value and the cure.
"""
