"""Examines a machine and a command line before a run: `fusionrl doctor`; `examine` has all checks in order."""
