"""Row-coupled attention: a weight depends on all logits of its row, not only on its own and on a sum.

rule.py       the base class of rules, stick-breaking, and the specification in plain torch
threshold.py  rules with a threshold per row, solved so that the row sums to 1
choice.py     the engines and how one is chosen
"""
