"""Room `sync`: pushes weights from trainers to engines and verifies it; `fusionrl.plan.push` plans it."""
