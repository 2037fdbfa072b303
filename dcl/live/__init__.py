"""Runs that are still going on: judged turn by turn, within bounds, over restarts."""
