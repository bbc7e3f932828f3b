"""Linear attention: weights that are products of features, summed once for all queries.

call.py          the rule, the call, NaN and Inf      choice.py   the engines and how one is chosen
attention.py     the sums, in chunks (chunks.py)      delta.py    the delta rule
logarithms.py    features that are exponentials
"""
