"""Which replica answers a request: policies and their index, shared by router and simulator."""
