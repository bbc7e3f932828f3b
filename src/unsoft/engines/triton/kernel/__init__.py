"""Triton code. The files of the kernels (forward.py, backward.py, decode.py) are loaded once for every
formula, with its functions in place of names that they leave open (see source.py); the others are ordinary
modules."""
