"""``python -m distdiag`` is the command ``distdiag``."""

from distdiag.cli import main

if __name__ == "__main__":
    main(prog_name="python -m distdiag")
