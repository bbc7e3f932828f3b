"""Timing of unsoft beside PyTorch's fused softmax, interleaved in one run, and only where results are right.

``unsoft bench`` is the command. ``workload`` defines the calls and who computes them, ``timing`` measures
them, ``fresh_process`` measures memory and start-up, ``plan`` lists all steps, ``record`` keeps and
shows the results.
"""
