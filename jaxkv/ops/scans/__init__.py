"""Recurrences over the tokens of a row, which leave the states that a memory keeps."""
