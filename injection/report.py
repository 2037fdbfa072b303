from __future__ import annotations


def summarise(counts, out):
    return str(counts)
