"""Stage 2: where keys and values lie, who shares them, and what is evicted."""
