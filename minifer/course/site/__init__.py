"""The book as a site: `minifer book site` lays its files out as pages, and Sphinx makes them HTML.

Nothing is executed and nothing is fetched: notebooks come with their outputs, formulas become
MathML, search is Sphinx's own and works from a folder.
"""
