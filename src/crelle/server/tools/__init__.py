"""Tool calls: how models write them, what they must match, and how they are found in an answer."""
