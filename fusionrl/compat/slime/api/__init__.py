"""Functions that only files written for slime use; `fusionrl.compat.slime.names` says which name is where."""
