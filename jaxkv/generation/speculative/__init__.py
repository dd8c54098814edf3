"""Several tokens for each step of the model: drafters, and the loop that verifies drafts."""
