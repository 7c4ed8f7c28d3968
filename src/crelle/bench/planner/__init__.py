"""The planner: what fits on given GPUs and how fast it decodes."""
