"""NVIDIA GPUs: the `cuda` device and its ways to copy. Imported only where there is one."""
