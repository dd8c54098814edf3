"""Conversion of text to tokens and of tokens to text."""
