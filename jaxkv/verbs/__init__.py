"""What is done to any memory: edits, questions, and plans carried out."""
