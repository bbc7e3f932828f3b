"""Records become one self-contained page: no network, a strict policy, everything escaped, light and dark."""
