"""Room `weights`: pushes weights from trainers to engines and verifies them; `fusionrl.plan.push` plans the push.

An engine or a rank that refuses, dies or takes too long ends the push with a `RuntimeError` that names it.
"""
