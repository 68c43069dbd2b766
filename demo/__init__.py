"""Trains a language model in a third of its memory and shows that the result is the same, bit for bit."""
