"""Row-coupled attention: a weight depends on all logits of its row, not only on its own and on a sum.

rules.py      the rules, and the specification in plain torch
choice.py     the engines and how one is chosen
"""
