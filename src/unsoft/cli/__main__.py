"""``python -m unsoft.cli``, for where the console script is not on the path."""

from unsoft.cli.app import main

main()
