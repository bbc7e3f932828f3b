"""The kinds of GPU that the kernels are compiled for; no Triton is needed to read this."""

SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64, "gfx950": 160}
"""How much shared memory one program may take."""
