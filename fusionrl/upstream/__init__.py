"""Room `upstream`: adapts SGLang and Megatron-core: their CPU layers, their versions, their own flags."""
