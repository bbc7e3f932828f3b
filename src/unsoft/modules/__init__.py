"""What mechanisms are made of; the files beside this folder are the mechanisms themselves, one each.

module.py       what every mechanism is and says of itself
cache.py        what decoding remembers
registry.py     names, and what they stand for
plugins.py      mechanisms that users and other packages bring
spec.py         that, as data
build.py        a name as a module
catalogue.py    all mechanisms at a glance
linear.py       linear attention
written.py      mechanisms given by their weights
token_factor.py a learned number for each token
gated_mass.py   a gate on the mass of every key
definition.py   what results are held against
"""
