"""The Triton engine: kernels for NVIDIA and AMD GPUs made from the formula, forward and backward,
memory linear in the length.

``codegen.py`` prints a formula and its derivatives as Triton functions, ``source.py`` joins them with the
kernels of ``kernel/``, ``binding.py`` runs those on a call. Triton itself is imported on first use only.
"""
