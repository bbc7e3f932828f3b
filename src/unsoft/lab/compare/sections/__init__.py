"""Sections of a comparison: each file is one, with its question, measurements, figures, columns and claims.

A file defines ``SECTION``, whose name is that of the file. :func:`unsoft.lab.compare.plan.sections` imports
only those that are requested.
"""
