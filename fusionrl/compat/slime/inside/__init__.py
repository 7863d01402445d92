"""Files that run in the sandbox: `main` starts a launch script there, with stand-ins for the programs that it calls.

They import the standard library and nothing else.
"""
