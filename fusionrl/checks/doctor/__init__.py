"""Examines a machine and a command line before a run: `fusionrl doctor`. Each module looks at one thing.

findings   the result of a check: a status, a fact, a cure
examine    all checks, in order
"""
