"""Functions that exist for files written for slime alone; `fusionrl.slime_names.table` says which name is where."""
