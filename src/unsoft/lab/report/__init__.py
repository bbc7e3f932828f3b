"""Self-contained pages and figures: no network, a strict content policy, everything escaped."""
