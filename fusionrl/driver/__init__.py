"""Room `driver`: the loop of a run, one function for each pipeline."""
