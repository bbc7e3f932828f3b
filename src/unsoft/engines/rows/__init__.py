"""Row-coupled attention: a weight depends on all logits of its row, not only on its own and on a sum.

rule.py       what a mechanism of this shape says of itself
threshold.py  rules with a threshold per row, solved so that the row sums to 1
dense.py      the specification, in plain torch
choice.py     the engines and how one is chosen
"""
