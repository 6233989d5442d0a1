"""Seconds of a step: given, fitted to a log, published, or read off a data sheet.

`times.py` says what a `StepTimes` is and has the plain ones; `named.py` finds any of them by name.
"""
