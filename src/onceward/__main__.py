"""`python -m onceward` is `onceward`."""

from onceward.cli.main import main

if __name__ == "__main__":
    main()
