"""Gates in attention: what the mechanism ``magnitude`` is made of, beside the geometry of the keys.

points.py     which keys there are, and where
row_gates.py  gates that differ from row to row
cache.py      what decoding remembers
options.py    what the options may be
"""
