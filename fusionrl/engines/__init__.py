"""Room `engines`: SGLang's servers and router as child processes, their control endpoints, the HTTP client.

It speaks to SGLang by HTTP and imports neither sglang, megatron nor ray. The exceptions run in the servers' processes:
`launch_server`, `launch_router`, `server_patches` and `adapter_versions`.
"""

# Environment of the servers: `spec` sets it, `launch_server` and what it patches read it.
DEVICE_VARIABLE = "FUSIONRL_DEVICE"
BITWISE_VARIABLE = "FUSIONRL_BITWISE"  # on a CPU, 1: the engine computes the same bits as the trainers
ADAPTERS_VARIABLE = "FUSIONRL_ADAPTERS"  # names of the adapters that the server gets, with commas between
NODES_VARIABLE = "FUSIONRL_ENGINE_NODES"  # set in the servers of an engine over several nodes
