"""`python -m crelle`: the command line of this interpreter's installation, whatever is first on PATH."""

from crelle.cli.main import main

if __name__ == "__main__":
    main()
