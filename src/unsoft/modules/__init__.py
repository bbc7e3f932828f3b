"""Building blocks of mechanisms; the mechanisms themselves are in unsoft/mechanisms, one file each.

module.py           base class, inputs of a call, choice of the prepared decoding step
cache.py            what decoding keeps between steps
pointwise.py        a formula as a module, and its fields
registry.py         mechanisms by name; spec.py: the same as data; build.py: a name as a module
plugins.py          mechanisms of users and of other packages
linear.py           linear attention (with linear_call.py, linear_decoding.py); delta.py: the delta rule
written.py          mechanisms given by their weights; row_coupled.py: by a rule for whole rows
head_pairs.py       differences of the maps of two heads
token_factor.py     a learned number for each token
key_gates.py        gates on keys; magnitude_cache.py: the cache of those that magnitude computes
definition.py       definitions that results are tested against
"""
