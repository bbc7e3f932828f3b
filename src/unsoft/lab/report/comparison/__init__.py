"""The page of ``unsoft compare``, its figures and its files."""
