"""Room `pipeline`: the controller of what is admitted, fetched, trained, pushed and dropped, and what a run waits for.

Pure: it knows no Ray, no clock and no file. `apply(state, knobs, event)` notes what has happened, and
`decide(state, knobs)` returns what to do next, or what the run waits for. Every pipeline, including the synchronous
one, is a setting of `Knobs`. May import nothing but `base`.
"""
