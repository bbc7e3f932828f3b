"""Triton code. symbols.py, sums.py, slopes.py and the kernels of formulas (forward.py, query_gradients.py,
key_gradients.py, decode.py) are loaded once for every formula, with its functions in place of names that they
leave open (see source.py); all others are ordinary modules."""
