"""A compact CLIP from pictures and words, in two stages: the text tower learns from a sentence encoder, the image tower
from the texts of its pictures. `recipe` says what is trained, `run` does it, `output` writes the folder.
"""
