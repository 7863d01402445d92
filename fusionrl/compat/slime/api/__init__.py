"""Functions that only files written for slime use; `fusionrl.compat.slime.names.table` says which name is where."""
