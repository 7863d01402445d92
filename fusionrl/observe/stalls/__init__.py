"""A run that stands still: when to speak of it, whom it waits for, and the stacks of its processes.

`when` decides, `sentence` says it; both are pure. `stacks` reads the stacks that processes wrote, `look` gets them.
"""
