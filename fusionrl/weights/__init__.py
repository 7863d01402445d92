"""Room `weights`: pushes weights from trainers to engines and verifies them; `fusionrl.plan.push` plans the push."""
