"""Stage 5: from tokens to text and to its end, under the eyes of guards."""
