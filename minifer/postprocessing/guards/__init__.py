"""What watches a reply while it is written: loops, drifting scripts, words that must not pass."""
