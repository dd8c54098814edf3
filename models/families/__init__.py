"""Model families: one file each, and the layers that they share."""
