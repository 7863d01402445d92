"""A stalled run: when to report it, what it waits for, and the stacks of its processes.

`when` decides, `sentence` says it; both are pure. `stacks` reads the stacks that processes wrote, `look` gets them.
"""
