"""Room `weights`: pushes weights from trainers to engines and verifies them; `fusionrl.plan.push_plan` plans the push.

A weight's way: `trainer/push_source.py`; `send.py` (plan, buffers); `gather.py` and `models/hf_io.py` (parts into
whole tensors); `broadcast.py`, `cuda_ipc.py` or shared memory; the engine; `checksums.py` and `verify.py`. The driver
leads in `push.py`.

An engine or a rank that refuses, dies or takes too long ends the push with a `RuntimeError` that names it.
"""
