"""Kinds of GPU that the kernels are compiled for; importing this needs no Triton."""

SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64, "gfx950": 160}
"""Most shared memory of one program."""
