"""Measures unsoft against PyTorch's own fused softmax, side by side in one run,
and only where the results are right.

``unsoft bench`` is the way in. The pieces: ``workload`` what is computed, ``contender`` by whom, ``gate`` is
it right, ``timing`` how long does it take, ``memory`` and ``startup`` the costs around it, ``plan`` the list
of all steps, ``bars`` the figures to reach, ``table`` and ``record`` what is shown and kept.
"""
