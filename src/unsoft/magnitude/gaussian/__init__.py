"""Gaussian similarities exp(-|x - y|^2) and what is made of them; compiled code where there is some, torch
everywhere else.

similarity.py   between points, with gradients
matrix.py       of a set, to multiply with, or with its ridge
factor.py       inverse Cholesky factors
system.py       several sets side by side, with their ridge

The compiled code is engines/native/gaussian.py and the folder kernel/gaussian beside it.
"""
