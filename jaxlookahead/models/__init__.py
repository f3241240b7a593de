"""Models: the contract (`protocol`), built-in Flax models, and wrappers for models defined elsewhere."""
