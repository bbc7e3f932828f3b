"""Triton code. functions.py, structures.py, tiles.py and copying.py are ordinary modules; the others are
loaded once for every formula, with its functions in place of names that they leave open (see source.py)."""
