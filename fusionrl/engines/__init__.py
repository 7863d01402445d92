"""Room `engines`: SGLang's servers and router as child processes, their control endpoints, the HTTP client.

It speaks to SGLang by HTTP and imports neither sglang, megatron nor ray: `launch_server` and
`launch_router`, which run in processes of their own, are the exception.
"""
