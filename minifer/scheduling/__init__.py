"""Stage 1: who computes how many tokens in this step, and who is thrown out when memory ends."""
