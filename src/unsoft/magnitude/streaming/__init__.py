"""Arrival weights of points that come one after the other.

window.py       exact, a row for each point                     arriving.py     decoding: whole sequences and
streams chunk.py        a state of fixed size: one step, for training and decoding centres.py      what is
remembered                              background.py   what the forgotten still predict
"""
