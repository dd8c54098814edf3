"""Checkpoints: weights and configs out of files, in one form whatever the file."""
