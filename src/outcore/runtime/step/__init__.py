"""step: what the calls of one training step hold, and how the step is metered."""
