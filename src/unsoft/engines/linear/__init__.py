"""Linear attention: weights that are products of features, summed once for all queries.

attention.py     the sums, in chunks            choice.py      which engine runs a call
logarithms.py    features that are exponentials    nonfinite.py   the rules for NaN and Inf
"""
