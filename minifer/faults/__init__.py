"""The bug clinic: faults of production engines, each one a switch on the real engine."""
