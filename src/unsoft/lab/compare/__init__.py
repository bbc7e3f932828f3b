"""Mechanisms side by side: measurements, the store that keeps them, and the sections that interpret them."""
