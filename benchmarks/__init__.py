"""Scores, floors and the command that prints them side by side; not part of the wheel."""
