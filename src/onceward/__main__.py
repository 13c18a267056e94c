"""`python -m onceward` runs the `onceward` command."""

from onceward.cli.main import main

if __name__ == "__main__":
    main()
