"""Constants, checks and helpers that know nothing of caches."""
