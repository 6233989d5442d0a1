"""Stages 3 and 4: from token ids to logits, and from logits to a token."""
