"""Layer 6, the command line. One file per command; each loads what it needs when it runs, so that --help is quick."""
