"""What mechanisms are made of; the files beside this folder are the mechanisms themselves, one each.

module.py       what every mechanism is and says of itself      cache.py      what decoding remembers
registry.py     names, and what they stand for                  build.py      a name as a module
catalogue.py    all mechanisms at a glance                      factor.py     a learned number for each token
affine.py       differences of two attention maps               linear.py     linear attention
gated_mass.py   a gate on the mass of every key
"""
