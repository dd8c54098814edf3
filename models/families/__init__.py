"""Model families: modules with a Flax model, its config and its checkpoint tensors."""
