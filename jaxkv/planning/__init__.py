"""From a batch to ubatches with slots, or to a refusal with its reasons."""
