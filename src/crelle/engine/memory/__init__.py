"""What an engine may use of memory: what is free, what a budget buys, and the budget where none is given."""
