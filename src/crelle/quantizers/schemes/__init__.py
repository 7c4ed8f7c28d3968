"""The schemes: which codes and scales to choose, one file for each."""
