"""Several engines behind one address: processes, health, routing."""
