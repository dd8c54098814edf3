"""What is done to any cache: edits, questions, and plans carried out."""
