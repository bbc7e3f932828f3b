"""The native engine: C++ generated from the formula, compiled by the system's compiler on first use.

codegen.py    formula -> C++            compiler.py   C++ -> cached shared library
binding.py    tensors -> the library    kernel/       what is the same for every formula
direct.py, step.py: the fast paths of small calls and of decoding; availability.py: which code is compiled;
gaussian.py: Gaussian matrices for magnitude; density.py: attention divided by densities of keys
"""
