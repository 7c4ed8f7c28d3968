"""What commands print: tables, plots, progress."""
