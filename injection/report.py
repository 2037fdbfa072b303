from __future__ import annotations
from pathlib import Path
def summarise(counts, out):
    return str(counts)
