"""planner: compare `search` with the lower bound and with other policies, on modeled hardware."""
