"""Stages 3 and 4 of a loop model: requests at different iterations share the core."""
