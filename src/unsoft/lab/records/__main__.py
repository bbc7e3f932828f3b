"""``python -m unsoft.lab.records study/study.db``."""

import sys

from unsoft.lab.records import PACKAGED, write_packaged

if len(sys.argv) != 2:
    raise SystemExit("give one file: the store of a study (study.db), or what it exported (.csv, .json)")
try:
    print(f"{PACKAGED}: {write_packaged(sys.argv[1])} runs")
except ValueError as problem:
    raise SystemExit(str(problem)) from None
