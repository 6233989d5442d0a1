"""Parcae, a looped transformer kept stable by a negative-diagonal A. Imported as `minifer.parcae`.

The package stands at the top of the tree as `parcae/` and is installed below `minifer`.
"""
