"""What people already have: readers of other projects' files."""
