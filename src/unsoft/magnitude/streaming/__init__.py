"""Arrival weights of points that come one after the other.

window.py       exact: a row of the factor for each point
chunk.py        with a state of fixed size: one step, for training and decoding
centres.py      what that state remembers
background.py   what the points that it has forgotten still predict
arriving.py     decoding, by either of the two
"""
