"""`python -m fedloom` is the command `fedloom`."""

from fedloom.cli import app

if __name__ == "__main__":
    app(prog_name="fedloom")
