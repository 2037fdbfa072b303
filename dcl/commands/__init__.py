"""The commands of `dcl`, and what they share."""
