"""The sections of a comparison: each file here is one, with its question,
measurements, figures, columns and claims, as ``SECTION``.
"""
