"""The Triton engine: kernels for NVIDIA and AMD GPUs generated from the formula, forward and backward, with
memory linear in the length.

``codegen.py`` prints a formula and its derivatives as Triton functions and renders them with the kernels of
``kernel/`` as one module. ``binding.py`` runs that on a call, ``launch.py`` chooses tile sizes.
``recurrence.py`` is linear attention, ``gaussian.py`` serves magnitude. Triton itself is imported on first
use only.
"""
