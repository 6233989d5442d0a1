"""Weights: from a name to a filled model.

`resolve` finds what a name means (a directory, a GGUF file, the pulled default); `hf` and `gguf`
read the two kinds of file; `loading` fills a model and checks that every parameter was set exactly
once; `pull` fetches the default model and `convert` writes a GGUF as safetensors.
"""
