"""One script an engine: each runs alone, in an interpreter that may know nothing of minifer.

`python FOLDER ENGINE` reads a job on standard input and answers on standard output; `__main__.py`
says what both look like, and asks `ENGINE_peer.py` for a `Peer` (a hyphen is a low line there).
"""
