"""slime's command line: its flags, its launch scripts, and where its defaults are others. Pure.

table      every flag of slime's and of Megatron-LM's that its scripts give, and what becomes of it here
translate  a command line of slime's → ours, with what is to be compared or said
shell      words of bash: quotes, variables, arithmetic
script     a launch script → the commands that it starts
python     a launcher in Python → the same
custom     flags that neither slime nor fusionrl has, and words that only the machine of the run knows
same       flags that are flags here
defaults   slime's defaults that differ and change training
page       the page of all of it
"""
