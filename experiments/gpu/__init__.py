"""``kvalloc gpu-check``: one module per stage, each in a process of its own."""
