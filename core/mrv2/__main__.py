"""`python -m mrv2`."""

from mrv2.cli import main

if __name__ == "__main__":
    main()
