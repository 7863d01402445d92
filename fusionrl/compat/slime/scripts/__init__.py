"""Launch scripts written for slime, in bash or Python: run in the sandbox, to see which runs they start.

script   what a script starts, writes and takes for granted
inside   what runs in the sandbox: stand-ins for the programs that a script calls
markers  text with parts that only the machine of the run knows
"""
