"""GPUs as NVIDIA's management library (NVML) knows them, and the host memory of processes."""
