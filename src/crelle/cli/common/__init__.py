"""What several commands share: the console, option groups, completion."""
