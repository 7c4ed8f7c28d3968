"""The commands of `crelle`, one a file."""
