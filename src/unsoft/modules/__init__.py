"""Building blocks of mechanisms; the mechanisms themselves are in unsoft/mechanisms, one file each.

module.py           base class, inputs of a call, choice of the prepared decoding step, numbers of tokens
cache.py            what decoding keeps between steps
pointwise.py        a formula as a module, and its fields
registry.py         mechanisms by name; spec.py: the same as data; build.py: a name as a module
plugins.py          mechanisms of users and of other packages
linear.py           linear attention; delta.py: the delta rule
rows.py             mechanisms given by the weights of whole rows
head_pairs.py       differences of the maps of two heads
key_gates.py        gates on keys, and the cache of those that magnitude computes
definition.py       definitions that results are tested against
"""
