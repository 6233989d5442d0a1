"""Triton kernels, one a file, each beside its slow twin. Imported as `minifer.kernels`.

The package stands at the top of the tree as `kernels/` and is installed below `minifer`, because
`kernels` is another project's name on the package index.
"""
