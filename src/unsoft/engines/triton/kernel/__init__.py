"""Triton code. forward.py and backward.py are templates: codegen.py renders them into one module for every
formula, behind the functions that the formula defines. All others are ordinary modules."""
