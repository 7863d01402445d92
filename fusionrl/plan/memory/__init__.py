"""An estimate of what a plan takes of its devices' and its hosts' memory. Pure; see docs/guides/check.md.

states       parameters, gradients, optimizer of a rank, exactly as Megatron lays them out; adapters
activations  what autograd keeps of a layer, and of a vision tower
trainer      both and the logits' share, by pipeline stage
engine       SGLang's weights and KV cache, also of a reward model's and a teacher's engines
bars         sums by device and node
report       all of it, and the verdict
advice       the least change that fits
"""
