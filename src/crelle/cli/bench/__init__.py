"""`crelle bench`: one file for each measurement."""
