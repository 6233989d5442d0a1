"""What the notebooks draw with. Nothing in the engine imports from here."""
