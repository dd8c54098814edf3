"""Constants, checks and helpers that do not depend on caches."""
