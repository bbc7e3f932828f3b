"""Mechanisms side by side: what is measured, in which order, and the store that remembers it."""
