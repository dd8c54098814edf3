"""Speculative decoding: drafters, and the loop that verifies drafts."""
