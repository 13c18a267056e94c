"""The `onceward` command. `main` puts the command groups together; each has a file or folder of its own."""
